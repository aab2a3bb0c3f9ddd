"""vLLM's executor for a stage behind stage 0: a worker in this process; with engine.tp others follow it."""

from typing import Any

from ...errors import EngineError
from .vllm_follower import main as follow
from .vllm_followers import Followers
from .vllm_rank import RankExecutor, meeting_place


class StageExecutor(RankExecutor):
    """The first rank of a stage: it commands the others."""

    followers: Followers

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """On all ranks, their answers in order."""
        if not len(self.followers):
            return super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        if kwargs or non_block or single_value:
            raise EngineError(f"vLLM calls {method} in a way that several ranks do not know")
        others = self.followers.turns.begin(method, *args)
        own = super().collective_rpc(method, timeout, args)
        return [*own, *others()]

    def beside(self, method: str, *arguments: Any) -> list[Any]:
        """On all ranks, beside what they compute; on this one last, so that what is here is everywhere."""
        others = self.followers.beside.ask(method, *arguments)
        return [getattr(self.worker, method)(*arguments), *others]

    def shutdown(self) -> None:
        """End the others first."""
        if hasattr(self, "followers"):
            self.followers.close()
        super().shutdown()

    def _init_executor(self) -> None:
        self._method = meeting_place(self)
        self.followers = Followers(self.parallel_config.tensor_parallel_size - 1)
        try:
            self.followers.start(follow, self.vllm_config, self._method)
            super()._init_executor()
        except BaseException:  # also when interrupted: they would wait for this one
            self.followers.close()
            raise
