"""What `primerl-node doctor` prints: checks, and plans of memory. Turns plans into rich renderables."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..node.doctor import Check
from ..node.planning.bill import GIB, Bill, gib
from ..node.planning.whole import Asked, Whole, describe

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def checks_table(checks: Sequence[Check]) -> Any:
    """The machine, a line for each check."""
    table = _table("", "MACHINE", "", "WHAT TO DO")
    for check in checks:
        state = f"[{STYLES[check.state]}]{check.state}[/]"
        table.add_row(state, check.name, escape(check.found), escape(check.advice))
    return table


def plan_parts(asked: Asked, whole: Whole) -> Iterator[Any]:
    """The plan, part by part."""
    yield f"\nmodel: {escape(describe(asked.shape))}"
    for note in whole.notes:
        yield f"note: {escape(note)}"
    yield ""
    yield _worker_table(asked, whole)
    yield f"[bold]{escape(whole.advice.verdict)}[/]"
    if whole.must_be_told:
        share = f"--engine.vllm.gpu-memory-utilization {whole.must_be_told:g}"
        yield f"vLLM's own share and what is beside it are more than this GPU has left: it needs {share}"
    if whole.worker.tight and whole.worker.fits:
        yield f"updates find no room beside it, and are loaded whole (a longer pause): {_looser(whole)}"
    for way in whole.advice.ways:
        gpus = f", {way.gpus} GPUs each" if way.gpus > 1 else ""
        plan = way.plan
        held = f"{min(plan.at_once, plan.wanted)} of {plan.length} tokens at once"
        yield f"  {escape(way.flags)}   ({held}{gpus})"
    yield ""
    yield _grid_table(whole)
    yield ""
    yield _trainer_table(asked, whole)
    yield from _trainer_verdict(asked, whole)
    if asked.shared and _gpu(asked):
        yield _shared(whole)


def _looser(whole: Whole) -> str:
    worker = whole.worker
    left = worker.device.nbytes - worker.device.taken - worker.beside.total
    share = max(0, int(100 * left / worker.device.nbytes)) / 100
    return f"--engine.vllm.gpu-memory-utilization {share:g} leaves them some"


def _worker_table(asked: Asked, whole: Whole) -> Any:
    engine, worker = whole.engine, whole.worker
    each = f"each of {engine.tp * engine.pp} GPUs" if _ranks(whole) > 1 else "the GPU"
    where = f"{each}, {gib(asked.device.nbytes)}" if _gpu(asked) else gib(asked.device.nbytes)
    title = f"WORKER: {engine.type}, {engine.dtype}, on {where}"
    table = _table(title, "MEMORY", "", right=("MEMORY",))
    _add(table, worker.engine)
    table.add_row("[bold]before its cache[/]", _amount(worker.engine.total), "")
    if worker.device.taken:
        table.add_row("others", _amount(worker.device.taken), "")
    share = "" if worker.utilization is None else f"gpu_memory_utilization {worker.utilization:g}"
    table.add_row("[bold]may take[/]", _amount(worker.budget), share)
    cache = f"{_amount(worker.sequence)} a sequence of {worker.length} tokens"
    table.add_row("[bold]left for its cache[/]", _amount(worker.room), cache)
    if worker.beside:
        _add(table, worker.beside, "beside: ")
    return table


def _grid_table(whole: Whole) -> Any:
    lengths = [f"{length:,}" for length in whole.grid.lengths]
    table = _table("SEQUENCES AT ONCE, by --engine.max-model-len", *lengths, right=lengths)
    for dtype, counts in whole.grid.rows.items():
        table.add_row(dtype, *(f"{count:,}" if count else "-" for count in counts))
    return table


def _trainer_table(asked: Asked, whole: Whole) -> Any:
    training = asked.config.training
    shared = f", {whole.ranks} ranks" if whole.ranks > 1 else ""
    title = (
        f"TRAINER: {training.seq_len} tokens a row, recompute {training.activation_checkpointing}"
    )
    table = _table(f"{title}{shared}", "MEMORY", "", right=("MEMORY",))
    _add(table, whole.learner.peak)
    _add(table, whole.companions, "beside: ")
    total = whole.learner.total + whole.companions.total
    table.add_row("[bold]at its worst moment[/]", _amount(total), "")
    return table


def _trainer_verdict(asked: Asked, whole: Whole) -> Iterator[str]:
    if whole.learner_fits:
        left = whole.learner_room - whole.learner.total
        yield f"[bold]fits, {gib(left)} left[/]"
        return
    yield f"[bold]does not fit: {gib(whole.learner.total - whole.learner_room)} short[/]"
    for way in whole.learner_ways:
        gpus = f" on each of {way.gpus} GPUs" if way.gpus > 1 else ""
        yield f"  {escape(way.flags)}   ({gib(way.plan.total)}{gpus})"
    if not whole.learner_ways:
        yield "  nothing that this plan knows would do: a smaller model, or --training.lora.rank 16"


def _shared(whole: Whole) -> str:
    if not whole.share:
        return "\n[bold]on one GPU: the trainer leaves nothing for a worker[/]"
    return f"\n[bold]on one GPU:[/] the trainer leaves {whole.share:.0%} of it to the worker"


def _add(table: Table, bill: Bill, prefix: str = "") -> None:
    for line in bill:
        how = f"{line.how}{', ' if line.how else ''}estimate" if line.estimate else line.how
        table.add_row(escape(prefix + line.name), _amount(line.nbytes), escape(how))


def _amount(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if abs(nbytes) >= GIB // 10 else gib(nbytes)


def _ranks(whole: Whole) -> int:
    engine = whole.engine
    return engine.pp * (engine.tp if isinstance(engine.tp, int) else 1)


def _gpu(asked: Asked) -> bool:
    return asked.device.kind == "cuda"


def _table(first: str, *others: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in (first, *others):
        table.add_column(name, justify="right" if name in right else "left")
    return table
