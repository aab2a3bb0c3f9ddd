from support.swarm import model_dir, quiet_registry

__all__ = ["model_dir", "quiet_registry"]
