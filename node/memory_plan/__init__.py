"""What models, engines and learners take of memory, computed before anything is loaded."""
