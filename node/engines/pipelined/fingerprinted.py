"""Which fingerprints a pipeline can make: those that its plan names."""

from ...errors import EngineError
from ...pipeline.place import Place


def check_fingerprint(name: str, place: Place) -> None:
    """Raise EngineError unless the stages of `place` make the fingerprint `name`, or none is asked for."""
    if name and name != place.shape.fingerprint:
        made = place.shape.fingerprint or "none"
        raise EngineError(
            f"the run wants fingerprints by {name!r}, and this pipeline makes {made}: "
            "a run whose workers may share a model takes 'projection'"
        )
