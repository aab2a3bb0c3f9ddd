"""What a node does as one stage of a pipeline, and the trainer for its pipelines."""
