"""The memory of models, engines and learners, predicted before anything is loaded."""
