"""The ranks that share a model, as torchrun starts them and the daemon drives them."""
