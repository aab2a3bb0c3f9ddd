"""Arithmetic of memory: what a model, an engine and a learner will take, said before anything is loaded."""
