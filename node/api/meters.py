"""What was served, counted, and told in Prometheus' text format.

What means the same as in vLLM has vLLM's name, so that its dashboards work; the rest is primerl_*.
"""

from collections import Counter
from collections.abc import Iterator

from ..engines.engine import EngineStats

BOUNDS_S = (0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Of the histogram of seconds."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Meters:
    """Counters since the start of the server."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._finished: Counter[str] = Counter()
        self._answers: Counter[tuple[str, int]] = Counter()
        self._prompt = self._generated = 0
        self._seconds = 0.0
        self._below = [0] * len(BOUNDS_S)

    def made(self, finish: str, seconds: float) -> None:
        """A completion ended so, after so long."""
        self._finished[finish] += 1
        self._seconds += seconds
        for index, bound in enumerate(BOUNDS_S):
            self._below[index] += seconds <= bound

    def tokens(self, prompt: int, generated: int) -> None:
        """Tokens of an answer."""
        self._prompt += prompt
        self._generated += generated

    def answered(self, route: str, status: int) -> None:
        """A request was answered; `route` is one of ours, or `other`."""
        self._answers[route, status] += 1

    def text(self, stats: EngineStats, *, inflight: int, version: int) -> str:
        """Everything, as Prometheus reads it."""
        rows = [
            *self._gauges(stats, inflight, version),
            *self._counters(stats),
            *self._histogram(),
        ]
        return "\n".join(rows) + "\n"

    def _gauges(self, stats: EngineStats, inflight: int, version: int) -> Iterator[str]:
        values = {
            "vllm:num_requests_running": (stats.running, "Sequences being generated"),
            "vllm:num_requests_waiting": (stats.waiting, "Requests that wait for room"),
            "vllm:kv_cache_usage_perc": (stats.kv_use, "Share of the cache in use, 0 to 1"),
            "primerl_inflight": (inflight, "Completions being made"),
            "primerl_policy_version": (version, "The policy version that is served"),
            "primerl_engine_up": (int(not stats.fault), "1 unless the engine cannot generate now"),
        }
        for name, (value, said) in values.items():
            yield from self._family(name, "gauge", said, [("", value)])

    def _counters(self, stats: EngineStats) -> Iterator[str]:
        families = {
            "vllm:prompt_tokens_total": (self._prompt, "Tokens of prompts"),
            "vllm:generation_tokens_total": (self._generated, "Tokens generated"),
            "vllm:num_preemptions_total": (stats.preemptions, "Sequences computed again"),
            "primerl_engine_restarts_total": (stats.restarts, "Times that an engine was restarted"),
        }
        for name, (value, said) in families.items():
            yield from self._family(name, "counter", said, [("", value)])
        ended = [(f'finished_reason="{reason}"', n) for reason, n in self._finished.items()]
        yield from self._family("vllm:request_success_total", "counter", "Completions", ended)
        told = [(f'route="{route}",code="{code}"', n) for (route, code), n in self._answers.items()]
        yield from self._family("primerl_http_requests_total", "counter", "Answers", told)

    def _histogram(self) -> Iterator[str]:
        name, count = "vllm:e2e_request_latency_seconds", sum(self._finished.values())
        yield f"# HELP {name} Seconds of a completion"
        yield f"# TYPE {name} histogram"
        for bound, below in zip(BOUNDS_S, self._below, strict=True):
            yield f'{name}_bucket{{{self._labels()},le="{bound}"}} {below}'
        yield f'{name}_bucket{{{self._labels()},le="+Inf"}} {count}'
        yield f"{name}_sum{{{self._labels()}}} {self._seconds}"
        yield f"{name}_count{{{self._labels()}}} {count}"

    def _family(
        self, name: str, kind: str, said: str, rows: list[tuple[str, int]] | list[tuple[str, float]]
    ) -> Iterator[str]:
        yield f"# HELP {name} {said}"
        yield f"# TYPE {name} {kind}"
        for labels, value in rows:
            more = f",{labels}" if labels else ""
            yield f"{name}{{{self._labels()}{more}}} {value}"

    def _labels(self) -> str:
        escaped = self._model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'model_name="{escaped}"'
