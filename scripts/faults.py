"""Plant one fault at a time in a copy of the tree and check that a test catches it.

    .venv/bin/python scripts/faults.py [--only NAME]... [--jobs 2] [--json FILE] [--list]

A fault is found by its source text, so that it survives a move of its file: `old` is whole lines, compared
without their indentation, first in `path` and else in all of crypto/, protocol/, node/ and cli/, where it must
occur once. The tests that a fault names run first; where none of them is left, or none fails, every test file
that imports the changed module runs. At the end all tests that caught something run once without any fault:
they must pass.

The working tree is never written to. Exits with 1 if a fault survives, cannot be planted or gets no verdict.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ("crypto", "protocol", "node", "cli")
LEFT_OUT = {"build", "dist", "outputs", "shared"}
"""Folders of the root that are not copied, besides those whose names begin with a dot."""
NAMED_S, IMPORTERS_S, CLEAN_S = 180, 300, 480
"""Longest run of the tests that a fault names, of those that import the changed module, and of the last run."""
TEST_S = 60
"""Longest run of a single test: a fault may make it wait for ever."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest when tests ran; any other means that they did not."""
SURVIVED = "survived"


@dataclass(frozen=True)
class Fault:
    """A fault to plant: the lines `old` of the file `path` become `new`."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    """Names of test functions that ought to fail, in whichever file they are."""


@dataclass(frozen=True)
class Verdict:
    """The result of one fault."""

    fault: str
    file: str
    caught_by: list[str]
    """Pytest ids of the test functions that failed."""
    seconds: float
    trouble: str = ""
    """SURVIVED, or why there is no verdict; empty for a fault that was caught."""


FAULTS = (
    # -- damaged files
    Fault(
        "a damaged log of a ledger is read up to the damage",
        "node/storage/ledger.py",
        "_check_log(path)  # before SQLite opens it, and drops what it cannot read",
        "pass",
        ("test_a_damaged_log_is_refused_before_the_transactions_behind_it_are_dropped",),
    ),
    Fault(
        "a changed byte in a closed ledger is believed",
        "node/storage/ledger.py",
        "if mark == self.boots() and sqlite_file.is_changed(path):",
        "if False:",
        ("test_any_changed_byte_in_the_ledger_of_a_trainer_that_ended_in_order_is_noticed",),
    ),
    Fault(
        "a resume point of another run is taken",
        "node/app/startup.py",
        'if saved is None or saved.ledger not in ("", ledger.ledger_id()):',
        "if saved is None:",
        ("test_a_resume_point_of_another_run_is_passed_over",),
    ),
    Fault(
        "a ledger that lacks what a resume point knows is taken",
        "node/trainer/state.py",
        '_refuse(f"resume point {step}", state, ledger, checkpoints)',
        "pass",
        ("test_a_ledger_that_lacks_what_a_resume_point_of_its_run_knows_is_older",),
    ),
    Fault(
        "a run without a checkpoint begins anew",
        "node/app/startup.py",
        "return await self._catch_up(role, ledger, checkpoint)",
        "return await self._catch_up(role, ledger, checkpoint) if checkpoint else None",
        ("test_versions_that_were_announced_before_the_first_checkpoint_was_written_are_kept",),
    ),
    Fault(
        "a trainer goes on with other tokens than its workers",
        "node/trainer/run_manifest.py",
        "_check_files(config, signed.manifest, files, model_dir)",
        "pass",
        ("test_a_run_does_not_go_on_with_other_tokens_than_its_workers_have",),
    ),
    Fault(
        "a column of kept rollouts whose name is damaged is left out",
        "node/storage/rollouts.py",
        "_check_columns(schema)",
        "pass",
        ("test_damaged_bytes_are_read_as_what_was_written_as_nothing_or_as_one_line",),
    ),
    # -- models of others
    Fault(
        "a family of models is imported by two threads at once",
        "node/models/huggingface.py",
        'import_model(directory)\nauto = _transformers("AutoModelForCausalLM")',
        'auto = _transformers("AutoModelForCausalLM")',
        ("test_one_thread_at_a_time_imports_modules_of_transformers",),
    ),
    Fault(
        "tensors of a GGUF file that transformers leaves out are left out",
        "node/models/conversion.py",
        "if stored != weights:",
        "if False:",
        ("test_what_transformers_would_leave_out_of_a_gguf_file_is_refused",),
    ),
    Fault(
        "special_tokens_map.json is not read",
        "node/models/tokenizer_files.py",
        "tokens = settings | read_json(legacy)",
        "pass",
        ("test_tokens_templates_and_ids_are_those_of_transformers",),
    ),
    Fault(
        "a head of its own under a config that ties it is trained",
        "node/models/huggingface.py",
        "if not head.equal(embedding):",
        "if False:",
        ("test_a_head_of_its_own_under_a_config_that_ties_it_is_refused",),
    ),
    # -- versions
    Fault(
        "two nodes take the older version that both speak",
        "protocol/version.py",
        "newest = min(self.newest, other.newest)",
        "newest = max(self.oldest, other.oldest)",
        ("test_two_nodes_speak_the_highest_version_that_both_know",),
    ),
    Fault(
        "a trainer answers in its own newest wire version",
        "node/trainer/workers.py",
        "return Welcome(self._sealed_manifest, __version__, common, now, leaders=leaders)",
        "return Welcome(self._sealed_manifest, __version__, own.newest, now)",
        ("test_a_run_goes_on_while_one_of_two_nodes_is_upgraded",),
    ),
    Fault(
        "documents of the version before are refused",
        "protocol/envelope.py",
        "if not spoken.speaks(version):",
        "if version != spoken.newest:",
        ("test_documents_of_every_version_that_a_node_speaks_are_read_and_of_no_other",),
    ),
    Fault(
        "a checkpoint of a newer release is passed over",
        "node/training/checkpoint.py",
        "            except _NewerFormat:\n                raise\n",
        "",
        ("test_a_checkpoint_of_a_newer_release_is_no_damage_and_none_before_it_takes_its_place",),
    ),
    # -- resume points
    Fault(
        "a resume point does not name the later work that it contains",
        "node/trainer/loop.py",
        "used=sorted(progress.used),",
        "used=[],",
        ("test_a_resumed_run_knows_whose_unjudged_work_its_buffer_contains",),
    ),
    Fault(
        "a version is announced before a resume can go on from it",
        "node/trainer/loop.py",
        "await self.publisher.publish(step, policy, before_announcing=durable)",
        "await self.publisher.publish(step, policy)",
        ("test_a_version_is_announced_only_after_its_resume_point_is_written",),
    ),
    Fault(
        "a published policy is taken over but for the sign of zero",
        "node/training/gather.py",
        "same = _bits(part.to(new.dtype)) == _bits(new)",
        "same = part.to(new.dtype) == new",
        ("test_a_published_policy_is_taken_over_where_bf16_shows_a_difference",),
    ),
    Fault(
        "a published policy that is taken over rounds all weights",
        "node/training/gather.py",
        "part.copy_(torch.where(same, part, new.to(part.dtype)))",
        "part.copy_(new.to(part.dtype))",
        ("test_a_published_policy_is_taken_over_where_bf16_shows_a_difference",),
    ),
    Fault(
        "a trainer that is stopped writes no checkpoint",
        "node/trainer/loop.py",
        "await self._save_at_stop()",
        "pass",
        ("test_a_trainer_that_is_stopped_writes_a_checkpoint_of_its_newest_step",),
    ),
    Fault(
        "an older version is handed over with the bits of the newer one",
        "node/weights/state_history.py",
        "self.new_bits = edits.newer if to_newer else edits.older",
        "self.new_bits = edits.newer",
        ("test_neighbours_of_a_history_are_handed_over_as_if_gathered",),
    ),
    # -- standbys
    Fault(
        "a trainer that goes on from a copy stays in the epoch of the lost one",
        "node/trainer/publisher.py",
        "if copied or succeeds:",
        "if False:",
        ("test_a_standby_leads_the_run_after_its_trainer_and_its_disk_are_lost",),
    ),
    Fault(
        "a standby writes whatever path the trainer states",
        "node/standby/mirror.py",
        "foreign = [file.path for file in files if not backed_up(file.path)]",
        "foreign: list[str] = []",
        ("test_a_trainer_cannot_write_other_files_to_a_standby",),
    ),
    Fault(
        "anybody may copy the run",
        "node/trainer/backups.py",
        "if peer not in self._hand_over.may_lead():",
        'if peer == b"":',
        ("test_a_standby_with_the_newest_backup_waits_and_others_are_refused",),
    ),
    Fault(
        "a leader signs in another one's epoch",
        "protocol/leaders.py",
        "if self.places().index(node) != place_of(epoch):",
        "if False:",
        ("test_a_head_in_an_epoch_of_somebody_else_is_refused",),
    ),
    Fault(
        "a contribution for another's samples is merged",
        "protocol/contributions.py",
        "if contribution.node != assignment.learner or body.assignment != digest(sealed_assignment):",
        "if contribution.node != assignment.learner:",
        ("test_a_contribution_to_anything_else_is_refused",),
    ),
    Fault(
        "numbers that are not finite are merged",
        "node/training/outer.py",
        "if not np.isfinite(value).all() or not math.isfinite(norm):",
        "if False:",
        ("test_a_number_that_is_not_finite_is_refused",),
    ),
    Fault(
        "what bf16 does not show is lost in place of kept",
        "node/training/outer.py",
        "change += residual",
        "change += 0 * residual",
        ("test_what_is_not_sent_is_kept_and_sent_once_it_can_be_seen",),
    ),
    Fault(
        "a learner believes whatever outer state the trainer signs",
        "node/learner/loop.py",
        "if made.digest != step.after:",
        "if made.digest != step.after and not step.contributions:",
        ("test_a_trainer_that_merges_wrongly_is_left_by_every_learner_with_a_proof",),
    ),
    Fault(
        "an older list of leaders is taken",
        "protocol/leaders.py",
        "if self.listed is not None and listed.number <= self.listed.number:",
        "if False:",
        ("test_an_older_list_changes_nothing_and_a_newer_one_revokes",),
    ),
    Fault(
        "what has a receipt is dropped though the next leader may not have it",
        "node/worker/upload.py",
        "if taken and listed is not None and len(listed.leaders) > 1:",
        "if False:",
        ("test_what_has_a_receipt_is_kept_for_the_next_leader_until_it_is_too_old",),
    ),
    Fault(
        "the deadline of an earlier leader's lease holds for the next one",
        "node/trainer/submissions.py",
        "if own and lease.deadline + LATE_GRACE_S < now:",
        "if lease.deadline + LATE_GRACE_S < now:",
        ("test_work_that_the_leader_before_leased_is_taken_though_its_lease_is_over",),
    ),
    # -- leases, audits, deltas
    Fault(
        "buffer refuses groups that were leased",
        "node/training/buffer.py",
        "return (max_off_policy_steps + 2) * groups_per_batch",
        "return 4 * groups_per_batch",
        ("test_a_runs_buffer_refuses_no_group_that_may_be_leased",),
    ),
    Fault(
        "strangers are audited as rarely as references",
        "node/verification/self_calibration.py",
        "return AuditConditions(applied, measured, all_audited=not placed, placing=not placed)",
        "return AuditConditions(applied, measured, not placed, not placed, audit_rate=self._reference_rate)",
        ("test_a_proven_reference_is_audited_as_often_as_renewing_the_bounds_takes",),
    ),
    Fault(
        "few changes of a delta are written without their base",
        "node/weights/codec.py",
        "np.copyto(tensor.out.data, tensor.base.data)",
        "pass",
        ("test_delta_gives_back_every_bit",),
    ),
    Fault(
        "positions of a block go on from those of the block that is decoded with it",
        "node/weights/sparse.py",
        "index[firsts[1:]] -= ends[:-1]",
        "pass",
        ("test_blocks_that_are_coded_together_are_coded_and_come_back_as_each_alone",),
    ),
    Fault(
        "the bitmap of a block begins within the last byte of the one before",
        "node/weights/sparse.py",
        "gaps[firsts[1:]] += -lengths[:-1] & 7",
        "pass",
        ("test_blocks_that_are_coded_together_are_coded_and_come_back_as_each_alone",),
    ),
    Fault(
        "what a sequence computes again is found by others",
        "node/inference/vllm_scheduler.py",
        "if request.num_preemptions and blocks[1] < had:",
        "if False:",
        ("test_a_request_that_lost_a_block_computes_all_anew_and_no_other_finds_it",),
    ),
    Fault(
        "kept keys and values that were lost go unnoticed",
        "node/inference/vllm_sampling.py",
        "self.lost[slot] = True",
        "pass",
        ("test_a_request_of_several_versions_has_lost_blocks_that_were_whole_at_the_change",),
    ),
    Fault(
        "the auditor reads on where its cache has lost what was kept",
        "node/verification/vllm_auditor.py",
        """raise AuditFailed("the auditor's cache has lost keys and values that are kept")""",
        "pass",
        ("test_replies_whose_kept_blocks_were_lost_are_read_again_fewer_at_a_time",),
    ),
    Fault(
        "a text that is being summed up is read again",
        "node/verification/vllm_auditor.py",
        "return [text for text in texts if text.sums is None]",
        "return list(texts)",
        ("test_texts_summed_up_before_vllm_died_are_not_read_again",),
    ),
    # -- crypto, protocol
    Fault(
        "derived hash does not separate its parts",
        "crypto/hashing.py",
        'hasher.update(len(part).to_bytes(8, "little"))',
        "pass",
        ("test_a_part_cannot_bleed_into_its_neighbour",),
    ),
    Fault(
        "key file that others can read is loaded",
        "crypto/keys.py",
        "if path.stat().st_mode & 0o077:",
        "if False:",
        ("test_a_key_file_that_others_can_reach_is_refused",),
    ),
    Fault(
        "purpose of a signature is not checked",
        "protocol/envelope.py",
        "if envelope.purpose != purpose:",
        "if False:",
        ("test_bytes_signed_for_one_purpose_never_pass_for_another",),
    ),
    Fault(
        "a ticket is packed where that changes its bytes",
        "protocol/tickets.py",
        "return packed if _unpack(packed) == sealed else None",
        "return packed",
        ("test_a_ticket_that_cannot_be_packed_is_written_whole",),
    ),
    Fault(
        "children of a service speak for it",
        "node/ops/service_manager.py",
        'self._address = environ.pop("NOTIFY_SOCKET", "")',
        'self._address = environ.get("NOTIFY_SOCKET", "")',
        ("test_a_manager_is_told_and_its_socket_is_kept_from_children",),
    ),
    Fault(
        "a link to a ticket leads anywhere",
        "node/p2p/seeds.py",
        'if parts.scheme.lower() != "https" or not host:',
        "if not host:",
        ("test_a_ticket_is_fetched_from_an_https_link_and_from_nothing_else",),
    ),
    Fault(
        "expiry of a ticket is not checked",
        "protocol/tickets.py",
        "ticket = unseal(sealed, Purpose.TICKET, Ticket, now=now).body",
        "ticket = unseal(sealed, Purpose.TICKET, Ticket, now=0).body",
        ("test_an_expired_ticket_is_refused",),
    ),
    Fault(
        "byte limit of a frame is lifted",
        "protocol/session.py",
        'size = int.from_bytes(header, "big")\nif size > limit:',
        'size = int.from_bytes(header, "big")\nif False:',
        ("test_a_length_is_refused_above_the_limit_and_only_there",),
    ),
    Fault(
        "policy is rolled back",
        "protocol/trust.py",
        "if admitted.order < self.committed:",
        "if False:",
        ("test_what_is_loaded_is_never_rolled_back",),
    ),
    Fault(
        "seed of a sample does not depend on its index",
        "protocol/leases.py",
        'index.to_bytes(4, "big"),\nturn.to_bytes(4, "big"),',
        'turn.to_bytes(4, "big"),',
        ("test_a_samples_seed_is_bound_to_every_argument",),
    ),
    Fault(
        "seconds that a worker states may be no number",
        "protocol/messages.py",
        "Seconds = Annotated[float, msgspec.Meta(ge=0, le=2**32)]",
        "Seconds = float",
        ("test_what_is_no_number_of_seconds_is_refused_where_statistics_are_read",),
    ),
    # -- replay
    Fault(
        "a replayed state is not compared with the signed one",
        "node/app/replay.py",
        "if policy.digest == head.state:",
        "if True:",
        ("test_a_changed_rollout_is_found_at_its_step",),
    ),
    Fault(
        "advantages of a replayed step are not made of its rewards",
        "node/app/replay.py",
        "if rollout.advantage != sample.advantage:",
        "if False:",
        ("test_a_changed_rollout_is_found_at_its_step",),
    ),
    # -- monitors
    Fault(
        "a monitor is sent the whole config",
        "node/ops/monitors.py",
        'public = config.model_dump(mode="json", include=PUBLIC)',
        'public = config.model_dump(mode="json", include=None)',
        ("test_a_monitor_gets_the_public_config_only",),
    ),
    Fault(
        "a monitor that hangs is waited for",
        "node/ops/monitors.py",
        "if not self._thread.close(deadline_s):",
        "if not self._thread.close(9999.0):",
        ("test_a_monitor_that_fails_or_hangs_holds_nothing_up",),
    ),
    # -- config
    Fault(
        "unknown key of a config of prime-rl's is dropped in silence",
        "node/config/prime_rl.py",
        'self._note("missing", shown, value, f"not a known key of prime-rl{hint}")',
        "pass",
        ("test_every_key_without_a_counterpart_is_named_with_its_reason",),
    ),
    Fault(
        "unknown key in the environment is ignored",
        "node/config/loader.py",
        'raise UsageError(f"unknown config key in the environment, {variable}{hint}")',
        "continue",
        ("test_a_mistake_names_the_key_and_the_way_out",),
    ),
    Fault(
        "prime-rl's reverse-text is the bundled one",
        "node/config/prime_rl.py",
        'environment["id"] = ENVIRONMENTS[source.plain][0]',
        'environment["id"] = source.plain',
        ("test_a_run_is_the_same_in_each_layout_of_prime_rl",),
    ),
    Fault(
        "evaluations of a config of prime-rl's never begin",
        "node/config/prime_rl.py",
        'self._default("evaluation.interval", 100)',
        "pass",
        ("test_a_value_there_is_a_value_here_that_means_the_same",),
    ),
    Fault(
        "all examples of prime-rl's are our default number",
        "node/config/prime_rl.py",
        'return environment | {"prompts": -1 if prompts is None else prompts}',
        'return environment if prompts in (None, -1) else environment | {"prompts": prompts}',
        ("test_a_value_there_is_a_value_here_that_means_the_same",),
    ),
    Fault(
        "checkpoints that prime-rl keeps are removed",
        "node/config/prime_rl.py",
        'for key in ("keep_interval", "weights_interval"):',
        "for key in ():",
        ("test_a_value_there_is_a_value_here_that_means_the_same",),
    ),
    Fault(
        "muon has AdamW's second beta",
        "node/config/prime_rl.py",
        'second = self._raw.get("beta2", 0.95 if muon else 0.999)',
        'second = self._raw.get("beta2", 0.999)',
        ("test_a_value_there_is_a_value_here_that_means_the_same",),
    ),
    Fault(
        "a linear schedule that falls elsewhere is not said",
        "node/config/prime_rl.py",
        'self._note("differs", "scheduler.decay_steps", int(decay), why)',
        "pass",
        ("test_what_does_not_mean_the_same_is_said",),
    ),
    Fault(
        "configs after prime-rl 0.8 get the defaults of before",
        "node/config/prime_rl.py",
        "if shared or NEWER.match(written):",
        "if False:",
        ("test_a_run_has_the_defaults_of_the_releases_that_its_keys_are_of",),
    ),
    Fault(
        "an environment's keys do not say of which release a config is",
        "node/config/prime_rl.py",
        "if keys & NEWER_OF_SOURCE:",
        "if False:",
        ("test_a_run_has_the_defaults_of_the_releases_that_its_keys_are_of",),
    ),
    Fault(
        "a section that is not there is an unknown key",
        "node/config/prime_rl.py",
        "return  # a section that is not there",
        "pass",
        ("test_a_dry_run_of_prime_rl_reads_as_the_config_that_it_resolved",),
    ),
    Fault(
        "a run of prime-rl's dry run is in itself",
        "node/config/prime_rl.py",
        'if kind == "rl" and name == "output_dir" != shown and name in self._trees["rl"]:',
        "if False:",
        ("test_a_dry_run_of_prime_rl_reads_as_the_config_that_it_resolved",),
    ),
    Fault(
        "a list's flag that is given twice keeps the last",
        "node/config/loader.py",
        "flags, loose = _structured(cls, _joined(cls, flags))",
        "flags, loose = _structured(cls, flags)",
        ("test_a_list_that_is_given_more_than_once_has_all_of_its_values",),
    ),
    Fault(
        "a flag makes a second key beside a file's with dashes",
        "node/config/loader.py",
        "key = name if name in result else dashed.get(name, name)",
        "key = name",
        ("test_a_flag_sets_the_key_of_a_file_that_has_dashes_in_its_name",),
    ),
    Fault(
        "a directory is read as a config file",
        "node/config/loader.py",
        'raise UsageError(f"{name} is a directory: name a config file in it")',
        "pass",
        ("test_a_directory_in_place_of_a_file_is_refused_in_one_line",),
    ),
    # -- trainer
    Fault(
        "lease does not expire",
        "node/trainer/lease_book.py",
        "late = [grant for grant in self.held.values() if grant.lease.deadline < now]",
        "late: list[Held] = []",
        ("test_tasks_of_an_expired_lease_go_out_again_first_and_in_order",),
    ),
    Fault(
        "who held all it might is passed over after its work came back",
        "node/trainer/lease_book.py",
        "del self.held[lease_id]\nself.full.discard(node)",
        "del self.held[lease_id]",
        ("test_of_hundreds_that_hold_all_they_may_that_one_is_looked_at_whose_work_came_back",),
    ),
    Fault(
        "a lease that is given back stays in the index of its node",
        "node/trainer/lease_book.py",
        "del of_node[number]",
        "pass",
        ("test_of_hundreds_that_hold_all_they_may_that_one_is_looked_at_whose_work_came_back",),
    ),
    Fault(
        "all that hold what they may are looked at whenever there is work",
        "node/trainer/scheduler.py",
        "if pending.proven and node not in book.full and not book.resting(node, now)",
        "if pending.proven and not book.resting(node, now)",
        ("test_of_hundreds_that_hold_all_they_may_that_one_is_looked_at_whose_work_came_back",),
    ),
    Fault(
        "who wants more is looked at before those that hold nothing",
        "node/trainer/scheduler.py",
        "waiting.sort(key=book.held.nodes.__contains__)",
        "",
        ("test_who_holds_nothing_is_leased_before_those_that_came_earlier_and_want_more",),
    ),
    Fault(
        "a verdict is told with the next work alone",
        "node/trainer/workers.py",
        "self.workers[node].verdicts.append(verdict)\nself.answer(node)",
        "self.workers[node].verdicts.append(verdict)",
        ("test_a_verdict_ends_the_wait_of_its_node_and_of_no_other",),
    ),
    Fault(
        "work that waits counts as whole leases",
        "node/trainer/scheduler.py",
        "counted[node] += len(grant.lease.tasks) if grant else whole",
        "counted[node] += whole",
        ("test_work_that_waits_counts_as_the_groups_of_its_lease",),
    ),
    Fault(
        "a view of all peers holds up the loop",
        "node/p2p/status_view.py",
        "if number % ROWS_AT_A_TIME == 0:",
        "if False:",
        ("test_a_view_of_hundreds_of_peers_leaves_turns_to_others",),
    ),
    Fault(
        "a lease that is answered with failures counts as kept",
        "node/trainer/lease_book.py",
        "if outcome.lost >= LOST_SHARE * outcome.groups:",
        "if False:",
        ("test_a_lease_that_is_answered_with_failures_is_lost_and_its_node_rests",),
    ),
    Fault(
        "a lease that is held counts as coming to its deadline",
        "node/trainer/lease_book.py",
        "if now - grant.granted > usual:",
        "if False:",
        ("test_leases_that_are_late_do_not_count_as_coming",),
    ),
    Fault(
        "a node is late by its own measure alone",
        "node/trainer/lease_book.py",
        "usual = max(times * min(own, self.lead.usual_s), LATE_LEAST_S)",
        "usual = max(times * own, LATE_LEAST_S)",
        ("test_a_node_that_makes_itself_slow_is_late_by_the_measure_of_the_others",),
    ),
    Fault(
        "a task whose group was lost is not leased again",
        "node/trainer/lease_book.py",
        "if tries < MAX_TRIES:",
        "if False:",
        ("test_a_lost_task_goes_out_again_to_whoever_asks_next_a_few_times",),
    ),
    Fault(
        "leases may be handed back for nothing",
        "node/trainer/lease_book.py",
        "if self.free_returns < 1.0:",
        "if False:",
        ("test_looking_at_leases_and_handing_some_back_is_free_for_restarts_alone",),
    ),
    Fault(
        "an environment is leased beyond its ratio without an end",
        "node/trainer/lease_book.py",
        "number for number, queue in enumerate(self.tasks) if behind and queue.owed <= -batch",
        "number for number, queue in enumerate(self.tasks) if behind and queue.owed <= -batch**9",
        ("test_an_environment_that_is_a_batch_ahead_of_its_ratio_waits_for_the_others",),
    ),
    Fault(
        "a slow player of an environment sets the pace of a mixture",
        "node/trainer/lease_book.py",
        "comes = queue.accepted_at > since and supplied >= fair * sum(paces.values())",
        "comes = queue.accepted_at > since",
        ("test_a_single_slow_player_of_an_environment_does_not_set_the_pace_of_the_run",),
    ),
    Fault(
        "a newcomer's lease is kept whatever came back",
        "node/trainer/lease_book.py",
        "self.newcomers.count(grant.newcomer.ticket, outcome.accepted > 0)",
        "self.newcomers.count(grant.newcomer.ticket, True)",
        ("test_a_ticket_whose_newcomers_answer_with_nothing_is_failing",),
    ),
    Fault(
        "incomplete groups of a worker that chooses are trained",
        "node/trainer/submissions.py",
        "if selective and len(group.rollouts) < lease.group_size:",
        "if False:",
        ("test_a_worker_that_takes_back_its_right_answers_shifts_no_rewards_and_is_named",),
    ),
    Fault(
        "a task is queued as often as it is lost",
        "node/trainer/lease_book.py",
        "if index not in self.requeued:",
        "if True:",
        (
            "test_a_task_goes_out_once_where_its_lease_was_taken_back_and_its_work_came_and_was_lost",
        ),
    ),
    Fault(
        "a repeated claim to play an environment is waited for anew",
        "node/trainer/lease_book.py",
        "if number in staffed and queue.staffed_at == -math.inf:",
        "if number not in staffed or queue.staffed_at == -math.inf:",
        ("test_a_claim_to_play_that_ends_and_comes_again_holds_up_the_others_no_longer",),
    ),
    Fault(
        "environments that share the debt to a third one do not wait for it",
        "node/trainer/lease_book.py",
        "or number in coming",
        "or False",
        ("test_environments_that_share_the_debt_to_a_third_wait_for_it_too",),
    ),
    Fault(
        "tokens are no progress of a lease",
        "node/worker/loop.py",
        "self._tokens, self._moved = tokens, now",
        "self._tokens = tokens",
        ("test_long_replies_are_waited_for_while_their_tokens_come",),
    ),
    Fault(
        "a slow engine hands back all its leases",
        "node/worker/loop.py",
        "self._usual_s, self._moved = quiet, now",
        "self._moved = now",
        ("test_an_engine_that_has_become_slow_does_not_hand_back_all_its_leases",),
    ),
    Fault(
        "an engine rests while it works",
        "node/inference/hosted.py",
        "if self._rests or busy or not idle or not self._may_rest():",
        "if self._rests:",
        ("test_an_engine_that_nobody_needs_ends_until_the_next_request",),
    ),
    Fault(
        "an engine hangs while its node stands still",
        "node/inference/hosted.py",
        "silence = min((min(child.silent_s, child.missed_s) for child in children), default=0.0)",
        "silence = min((child.silent_s for child in children), default=0.0)",
        (
            "test_an_engine_that_gives_no_sign_of_life_is_reported_to_hang_and_one_whose_node_stood_still_is_not",
        ),
    ),
    Fault(
        "what a trainer lost counts against the worker",
        "node/trainer/submissions.py",
        "if self.epoch.voids(pending.submission, pending.lease):  # the trainer lost the policy",
        "if False:",
        ("test_work_of_a_policy_that_the_trainer_lost_costs_its_worker_nothing",),
    ),
    Fault(
        "what a later stage spoilt counts against stage 0",
        "node/trainer/lease_outcomes.py",
        "if ours or rejection.reason in excused_for or place in others:",
        "if ours or rejection.reason in excused_for:",
        ("test_what_another_stage_may_have_spoilt_is_no_loss_of_the_signer",),
    ),
    Fault(
        "tasks of lost groups in used work are forgotten in a restart",
        "node/trainer/loop.py",
        "unused = (submission for submission in arrived if submission.arrival not in state.used)",
        "unused = iter(arrived)",
        ("test_a_lost_group_of_used_work_waits_to_be_leased_again_in_a_resumed_run",),
    ),
    Fault(
        "a worker is leased environments that it cannot play",
        "node/trainer/lease_book.py",
        "if most >= 1 and number in share.playable",
        "if most >= 1",
        ("test_a_worker_is_leased_only_what_it_can_play",),
    ),
    Fault(
        "trust in one environment is trust in another",
        "node/trainer/submissions.py",
        "return audit_rate(reputation.of(environment), base, odd, reputation.recent_fault)",
        'return audit_rate(reputation.of("sums"), base, odd, reputation.recent_fault)',
        ("test_a_worker_that_earned_trust_in_one_environment_is_audited_as_a_newcomer_in_another",),
    ),
    Fault(
        "work of a lease that is over is taken",
        "node/trainer/submissions.py",
        "if own and lease.deadline + LATE_GRACE_S < now:",
        "if False:",
        ("test_work_from_before_a_restart_is_taken_only_until_its_lease_is_over",),
    ),
    Fault(
        "worker that hides its address connects to others",
        "node/app/services.py",
        "may_dial=lambda peer: not hidden or peer in trusted.leaders,",
        "may_dial=lambda peer: True,",
        ("test_a_worker_that_does_not_share_its_address_is_seen_by_its_trainer_alone",),
    ),
    Fault(
        "children get the node's credentials",
        "node/process/spawn.py",
        "if name not in PRIVATE and not _CREDENTIAL.search(name)",
        "if name",
        ("test_credentials_are_no_variables_of_a_process_that_asks_no_service",),
    ),
    Fault(
        "audits on a CPU are not confined",
        "node/verification/hf_auditor.py",
        "program, environment = start.command, environment | start.variables",
        "start.variables.clear()",
        ("test_a_process_that_audits_on_a_cpu_reaches_no_network_and_no_other_process",),
    ),
    Fault(
        "frame of a log that names an older log ends the log",
        "node/storage/sqlite_file.py",
        "if salts != (salt_1, salt_2):\nbreak",
        "if salts != (salt_1, salt_2):\n    return ''",
        ("test_a_damaged_log_is_refused_before_the_transactions_behind_it_are_dropped",),
    ),
    Fault(
        "receipt is given before the submission is durable",
        "node/trainer/submissions.py",
        "arrival = await self._ledger.beside(\n"
        "self._ledger.receive, name, lease.lease_id, peer, data, int(now)\n)",
        "arrival = self._ledger.last_arrival() + 1",
        ("test_work_from_before_a_restart_is_taken_only_until_its_lease_is_over",),
    ),
    Fault(
        "audit is drawn before the receipt",
        "node/trainer/submissions.py",
        "challenge = secrets.token_bytes(CHALLENGE_BYTES)",
        "challenge = arrived.digest",
        ("test_what_is_audited_cannot_be_told_from_the_bundle",),
    ),
    Fault(
        "bound on the states kept for audits is dropped",
        "node/weights/state_history.py",
        "self._held = {number: states[number] for number in [*states][-self._keep :]}",
        "self._held = {number: states[number] for number in [*states]}",
        ("test_only_the_newest_states_stay_in_memory",),
    ),
    Fault(
        "row of a worker that lost leases is dropped",
        "node/trainer/workers.py",
        "and (leases is None or leases == NodeRecord())",
        "",
        ("test_rows_of_400_keys_that_left_go_and_those_that_remember_something_stay",),
    ),
    # -- worker
    Fault(
        "upload is given up when the trainer is busy",
        "node/worker/upload.py",
        "if refusal.reason not in FINAL_REASONS:",
        "if False:",
        ("test_what_failed_is_kept_and_tried_again",),
    ),
    Fault(
        "receipt for another submission is believed",
        "node/worker/upload.py",
        "if opened.body.submission != name:",
        "if False:",
        ("test_a_receipt_for_something_else_is_none",),
    ),
    Fault(
        "environment that the owner did not allow is run",
        "node/environments/allowed.py",
        "if not is_remembered(package, data_dir):",
        "if False:",
        ("test_an_installed_package_is_played_once_its_name_is_allowed",),
    ),
    # -- validator
    Fault(
        "validator audits other bytes than those of its job",
        "node/validator/loop.py",
        "if digest(data) != job.submission:",
        "if False:",
        ("test_the_bytes_behind_a_job_must_be_those_that_it_names",),
    ),
    Fault(
        "report on another challenge is taken",
        "node/trainer/audits.py",
        "if report.challenge != job.call.challenge:",
        "if False:",
        ("test_a_report_counts_only_as_its_validator_signed_it_for_this_job",),
    ),
    # -- training
    Fault(
        "sign of the policy gain is flipped",
        "node/training/losses.py",
        "values = _pull(config, inputs) - gain.masked_fill(low | high, 0.0)",
        "values = _pull(config, inputs) + gain.masked_fill(low | high, 0.0)",
        ("test_a_loss_and_its_gradient_are_the_closed_form",),
    ),
    Fault(
        "a difficulty pool is chosen by the lowest reward",
        "node/training/curriculum.py",
        "names = (name for name, pool in self._pools if reward <= pool.threshold)",
        "names = (name for name, pool in self._pools if reward >= pool.threshold)",
        ("test_a_task_is_in_the_first_pool_that_its_reward_does_not_exceed",),
    ),
    Fault(
        "advantage is not centred on its group",
        "node/training/advantages.py",
        "return [reward - mean for reward in rewards]",
        "return [reward for reward in rewards]",
        ("test_grpo_is_the_distance_from_the_group_mean",),
    ),
    Fault(
        "samples of a row are all read at its first one's temperature",
        "node/training/learner.py",
        "return each if len(set(each)) > 1 else (each or [self._temperature])[0]",
        "return (each or [self._temperature])[0]",
        ("test_each_sample_of_a_row_is_read_at_its_environments_temperature",),
    ),
    Fault(
        "loss of an environment is divided by its own tokens",
        "node/training/learner.py",
        "loss, figures = policy_loss(losses[number], part, packed.tokens, packed.echo_tokens)",
        "loss, figures = policy_loss(losses[number], part, len(part.logprobs), packed.echo_tokens)",
        ("test_a_step_of_a_mixture_is_the_mean_over_the_tokens_of_all_its_losses",),
    ),
    Fault(
        "loss is normalised by the tokens of one rank",
        "node/training/packing.py",
        "return sum(_drawn(sample) for sample in self._samples if not sample.given)",
        "return sum(_drawn(sample) for row in self.dealt[0] for sample in row if not sample.given)",
        ("test_every_fitting_sample_is_in_exactly_one_row_whole",),
    ),
    Fault(
        "positions run on over packed sequences",
        "node/training/packing.py",
        "positions=np.concatenate([np.arange(length) for length in lengths]),",
        "positions=np.arange(sum(lengths)),",
        ("test_position_zero_and_padding_are_never_trained",),
    ),
    Fault(
        "staleness bound is off by one",
        "node/training/buffer.py",
        "return self._version - group.policy_oldest > self.max_off_policy_steps",
        "return self._version - group.policy_oldest > self.max_off_policy_steps + 1",
        ("test_no_batch_ever_holds_a_group_older_than_the_bound",),
    ),
    Fault(
        "files of a checkpoint are not compared with its record",
        "node/training/checkpoint.py",
        "if record.files != _digests(directory):",
        "if False:",
        ("test_damage_is_noticed_before_anything_is_resumed",),
    ),
    Fault(
        "a key of config.json with which training differs is accepted",
        "node/training/parity.py",
        "if largest <= NATS:",
        "if largest <= 1e9:",
        ("test_a_key_that_makes_training_differ_is_refused_by_name",),
    ),
    Fault(
        "a checkpoint's tensors are not looked at before a run",
        "node/training/parity.py",
        'strange = strange_tensors(read_json(directory / "config.json"), tensor_names(directory))',
        "strange = list[str]()",
        ("test_tensors_that_the_model_has_no_place_for_are_refused_before_and_as_it_loads",),
    ),
    Fault(
        "Granite's logits are not divided",
        "node/training/model.py",
        "scale = scale * self._divisor",
        "pass",
        ("test_what_is_accepted_is_computed_as_transformers_does",),
    ),
    # -- inference
    Fault(
        "draft is accepted that was not drawn",
        "node/inference/vllm_sampling.py",
        "right = (before == before[self.first][self.requests]).long()",
        "right = (before >= 0).long()",
        ("test_of_the_drafts_those_are_accepted_that_are_drawn_and_nothing_else_is_kept",),
    ),
    Fault(
        "draft is drawn with the noise of another position",
        "node/inference/vllm_sampling.py",
        "drafting.positions.add_(counts)",
        "pass",
        ("test_a_drafter_with_the_models_own_logits_drafts_the_sampled_tokens",),
    ),
    Fault(
        "log-probability ignores the temperature",
        "node/inference/sampler.py",
        "scores = noisy.gather(1, tokens)\nlogprobs = torch.log_softmax(scaled, -1).gather(1, tokens)",
        "scores = noisy.gather(1, tokens)\nlogprobs = torch.log_softmax(logits.float(), -1).gather(1, tokens)",
        ("test_logprobs_are_those_of_a_plain_forward_pass_at_the_request_temperature",),
    ),
    Fault(
        "new version is announced and its weights are not written",
        "node/inference/hf.py",
        "written = loaded is not None and loaded.network.update(state, changed)",
        "written = loaded is not None",
        (
            "test_after_updates_an_engine_equals_a_fresh_one_whose_first_update_or_load_is_the_new_state",
        ),
    ),
    Fault(
        "rows of FP8 weights keep their old scales",
        "node/inference/model.py",
        "changed = {name: None if name in whole else at for name, at in changed.items()}",
        "pass",
        ("test_an_update_in_place_gives_the_bits_of_a_fresh_model",),
    ),
    # -- pipeline
    Fault(
        "stage accepts a peer that the plan does not put before it",
        "node/pipeline/acceptor.py",
        "if rank is None or plan.before(rank) != peer:",
        "if rank is None:",
        ("test_a_stage_opens_a_line_only_to_the_one_after_it",),
    ),
    Fault(
        "stage writes to a cache block that does not exist",
        "node/pipeline/step_codec.py",
        "if part.blocks and not 0 < min(part.blocks) <= max(part.blocks) <= self._most_blocks:",
        "if False:",
        (
            "test_a_step_outside_the_plan_is_refused",
            "test_the_last_block_is_the_plans",
        ),
    ),
    Fault(
        "stage takes an older plan of its group again",
        "node/pipeline/acceptor.py",
        "if known is not None and plan.generation < known.plan.generation:",
        "if False:",
        ("test_an_older_generation_counts_no_more",),
    ),
    Fault(
        "stage takes two plans of one generation",
        "node/pipeline/acceptor.py",
        "if known is not None and not news and known.payload != opened.payload:",
        "if False:",
        ("test_two_plans_of_one_generation_are_refused",),
    ),
    Fault(
        "stage answers probes without a limit",
        "node/pipeline/acceptor.py",
        "if self._buckets.debt(peer, time.monotonic(), size) > 0:",
        "if False:",
        ("test_probes_are_answered_to_those_who_may_share_a_model_and_not_for_ever",),
    ),
    Fault(
        "engine of a stage may change the fingerprints of earlier stages",
        "node/pipeline/trails.py",
        "if not trail.startswith(plain):",
        "if False:",
        ("test_an_engine_that_forges_what_others_said_breaks_its_own_stage",),
    ),
    Fault(
        "stage 0 does not verify the signatures of a trail",
        "node/pipeline/trails.py",
        "if not verify(self._nodes[rank], signature, self._message(packet, rank, trail[:end])):",
        "if False:",
        ("test_no_byte_can_be_changed_by_a_later_stage",),
    ),
    Fault(
        "stage computes on after a fault of its epoch",
        "node/pipeline/stage_loop.py",
        "elif frame.epoch != self._epoch or self._failed == self._epoch:",
        "elif frame.epoch != self._epoch:",
        ("test_after_a_fault_nothing_of_that_chain_is_computed_until_another_begins",),
    ),
    Fault(
        "lane whose tokens are still under way is sent again",
        "node/pipeline/micro_batches.py",
        "if lane in in_flight:",
        "if False:",
        ("test_lanes_take_turns_and_no_lane_is_sent_twice_at_once",),
    ),
    Fault(
        "trips of another number of micro-batches count",
        "node/pipeline/micro_batches.py",
        "if sent[1] == self._changes:",
        "if True:",
        ("test_trips_of_the_number_before_do_not_count",),
    ),
    # -- memory plan
    Fault(
        "a node may claim to be nearer than others measure",
        "node/memory_plan/planner.py",
        "return max((value for value in known if value is not None), default=UNKNOWN_MS)",
        "return min((value for value in known if value is not None), default=UNKNOWN_MS)",
        ("test_no_node_is_placed_nearer_to_others_than_they_measure",),
    ),
    Fault(
        "the last stage's head is no work",
        "node/memory_plan/planner.py",
        "work[-1] += costs.last",
        "pass",
        ("test_layers_are_even_where_memory_allows_and_the_head_counts_as_work",),
    ),
    Fault(
        "copies of keys and values count as room",
        "node/memory_plan/stages.py",
        "copies = max(1, -(-ranks // shape.kv_heads))",
        "copies = 1",
        ("test_copies_of_keys_and_values_are_no_room",),
    ),
    Fault(
        "memory in use on a GPU is offered to a stage",
        "node/memory_plan/stages.py",
        "budget = min(int(share * device.nbytes), device.nbytes - device.taken - beyond - RESERVE)",
        "budget = int(share * device.nbytes)",
        ("test_a_gpu_offers_what_its_engine_leaves_for_weights_and_cache",),
    ),
    # -- launch
    Fault(
        "slices of MIG are joined",
        "node/launch/placement.py",
        "if len(names) > 1 and any(map(is_slice, names)):",
        "if False:",
        ("test_what_cannot_be_done_is_refused_with_what_to_say",),
    ),
    Fault(
        "GPUs that were asked for lie idle",
        "node/launch/placement.py",
        "if idle and explicit:",
        "if False:",
        ("test_what_cannot_be_done_is_refused_with_what_to_say",),
    ),
    Fault(
        "a share of memory that was set is planned over",
        "node/launch/placement.py",
        'if config.engine.type != "vllm" or MEMORY_KEYS & set(config.engine.vllm):',
        'if config.engine.type != "vllm":',
        ("test_memory_is_divided_only_where_gpus_are_shared_and_nothing_was_said",),
    ),
    # -- evaluation
    Fault(
        "a rollout of exactly the reward of success is unsolved",
        "node/evaluation/statistics.py",
        "sum(not rollout.error and rollout.reward >= success for rollout in group)",
        "sum(not rollout.error and rollout.reward > success for rollout in group)",
        ("test_success_is_a_threshold_of_the_reward",),
    ),
    Fault(
        "a failed rollout with a reward counts as solved",
        "node/evaluation/statistics.py",
        "sum(not rollout.error and rollout.reward >= success for rollout in group)",
        "sum(rollout.reward >= success for rollout in group)",
        ("test_a_failed_rollout_counts_as_unsolved_and_says_why",),
    ),
    Fault(
        "a cell that does not count is kept",
        "node/evaluation/eval_suite.py",
        "if cell.counts:",
        "if True:",
        ("test_a_cell_that_failed_whole_or_was_sampled_otherwise_is_measured_again",),
    ),
    Fault(
        "results of other samplings are taken from disk",
        "node/evaluation/eval_suite.py",
        'sampling=config.sampling.model_dump(mode="json"),',
        "sampling={},",
        ("test_a_cell_that_failed_whole_or_was_sampled_otherwise_is_measured_again",),
    ),
    # -- sft
    Fault(
        "SFT exports ruined weights",
        "node/sft/loop.py",
        "if not math.isfinite(loss):",
        "if False:",
        ("test_a_validation_loss_that_is_no_number_ends_a_run_and_exports_nothing",),
    ),
    Fault(
        "a run goes on with other data",
        "node/sft/loop.py",
        "if state.identity != identity:",
        "if False:",
        ("test_other_data_are_not_resumed",),
    ),
    Fault(
        "replies of weight 0 are trained",
        "node/sft/rows.py",
        'cast(Mapping[str, Any], message).get("weight") != 0 for message in cast(list[Any], value)',
        "True for _ in cast(list[Any], value)",
        ("test_a_weight_of_0_makes_a_reply_context",),
    ),
    # -- cli
    Fault(
        "any answer at the terminal allows an environment",
        "cli/join.py",
        'elif answer not in ("y", "yes"):',
        "elif False:",
        ("test_any_other_answer_and_no_terminal_refuse",),
    ),
    Fault(
        "without a terminal a key is ended unasked",
        "cli/identity.py",
        "if not yes:",
        "if False:",
        ("test_a_retired_key_is_stated_once_and_no_node_starts_with_it_again",),
    ),
    Fault(
        "a retirement that no trainer took counts as told",
        "cli/identity.py",
        "if not answers or any(answers.values()):",
        "if False:",
        ("test_a_retired_key_is_stated_once_and_no_node_starts_with_it_again",),
    ),
    Fault(
        "a ticket that is used up is listed as valid",
        "cli/ticket.py",
        'return "used up" if row["uses"] and row["admitted"] == row["uses"] else "valid"',
        'return "valid"',
        ("test_a_list_says_of_each_ticket_whether_it_still_admits",),
    ),
    # -- weights
    Fault(
        "digest of a tensor is not compared",
        "node/weights/replica.py",
        "if hashes.get(info.name, info.digest) != info.digest:",
        "if False:",
        ("test_any_tensor_that_differs_from_the_manifest_is_refused",),
    ),
    Fault(
        "delta is applied to the wrong base",
        "node/weights/replica.py",
        "if artifact.base_state != current.digest:",
        "if False:",
        ("test_delta_on_another_base_is_refused",),
    ),
    Fault(
        "path in the chain ignores the state of its base",
        "node/weights/chain.py",
        "return routes.get((artifact.base_version, artifact.base_state))",
        "return next((route for key, route in routes.items() if key[0] == artifact.base_version), None)",
        ("test_delta_on_another_state_or_from_the_future_is_never_planned",),
    ),
    Fault(
        "payload of other tensors is decoded",
        "node/weights/payload.py",
        "if bytes(self._take(_HEADER.size)) != header(kind, layout):",
        "if not bytes(self._take(_HEADER.size)):",
        ("test_payload_for_other_tensors_is_refused",),
    ),
    # -- p2p
    Fault(
        "bound on the requests of one peer is dropped",
        "node/p2p/connections.py",
        "crowded = self._streams[account] >= self._max_streams",
        "crowded = False",
        ("test_more_streams_at_once_than_allowed_are_refused_and_the_others_answered",),
    ),
    Fault(
        "a second machine with a node's key is answered",
        "node/trainer/sessions.py",
        "if await self._answers(session):",
        "if False:",
        (
            "test_a_copy_of_a_working_directory_is_refused_and_the_first_machine_goes_on",
            "test_while_the_first_lives_a_second_is_refused_however_often_it_comes",
        ),
    ),
    Fault(
        "a session that asked a moment ago counts as alive",
        "node/trainer/sessions.py",
        "return await asyncio.shield(session.probe)",
        "return True",
        ("test_a_worker_that_was_killed_gets_leases_again_under_its_old_key",),
    ),
    Fault(
        "any connection of iroh counts as alive",
        "node/p2p/iroh.py",
        "if self._connection.stats().udp_rx_datagrams != received:",
        "if True:",
        ("test_a_peer_that_was_killed_is_noticed_without_a_word_from_it",),
    ),
    Fault(
        "a thief uses up the requests of a key",
        "node/p2p/connections.py",
        'return self.connection.peer + (b"" if own else b"+")',
        "return self.connection.peer",
        ("test_requests_that_the_gate_refused_leave_those_of_the_same_key_their_allowance",),
    ),
    Fault(
        "a node's own upload is dropped when its key is in use elsewhere",
        "node/worker/upload.py",
        "Reason.KEY_IN_USE,\nReason.NOT_ADMITTED,",
        "Reason.NOT_ADMITTED,",
        ("test_what_failed_is_kept_and_tried_again",),
    ),
    Fault(
        "anybody retires a key",
        "protocol/retirement.py",
        "if retirement.node != opened.signer:",
        "if False:",
        ("test_nobody_but_its_holder_retires_a_key",),
    ),
    Fault(
        "a new key takes a place without its own consent",
        "protocol/retirement.py",
        "if consent.body != Succession(retirement.node, retirement.made):",
        "if False:",
        ("test_a_consent_holds_for_the_key_and_the_time_that_it_names",),
    ),
    Fault(
        "a rotation sheds a ban",
        "node/trainer/workers.py",
        "self.reputations[successor] = self.reputations.pop(node)",
        "self.reputations.pop(node)",
        ("test_a_new_key_does_not_shed_a_ban",),
    ),
    Fault(
        "a ban never ends",
        "protocol/reputation.py",
        "if not self.banned_until or now < self.banned_until:",
        "if True:",
        ("test_a_ban_with_an_end_is_over_by_itself_and_leaves_the_trust_as_it_was",),
    ),
    Fault(
        "a retirement is forgotten when the trainer starts again",
        "node/trainer/workers.py",
        "self.services.ledger.retire(node, sealed)",
        "pass",
        ("test_a_key_that_its_owner_retired_is_refused_for_ever_and_its_work_stays",),
    ),
    Fault(
        "a record of a retired key is believed",
        "node/p2p/peers.py",
        "if peer.retired:",
        "if False:",
        ("test_a_node_whose_key_is_retired_is_no_source_any_more_and_stays_forgotten",),
    ),
    Fault(
        "request has no deadline",
        "node/p2p/rpc.py",
        "async with asyncio.timeout(deadline):\nstream = await connection.open_stream()",
        "async with asyncio.timeout(None):\n    stream = await connection.open_stream()",
        ("test_a_request_that_is_not_answered_costs_its_deadline",),
    ),
    Fault(
        "chunk is kept and served before it is verified",
        "node/p2p/download.py",
        "if len(data) != chunk.size or digest(data) != chunk.digest:",
        "if len(data) != chunk.size:",
        ("test_a_corrupting_neighbour_costs_one_chunk_and_is_left_out_of_the_next_fetch",),
    ),
    Fault(
        "a source that lets us wait is never doubted",
        "node/p2p/download_state.py",
        "return account is not None and self.waited(source, now) >= account.patience",
        "return False",
        ("test_a_source_that_lets_us_wait_holds_no_other_chunk_back_from_then_on",),
    ),
    Fault(
        "lines at untried sources keep out those that give",
        "node/p2p/download_state.py",
        "if account is None or account.delivered:",
        "if account is None:",
        ("test_lines_at_sources_that_gave_nothing_keep_out_no_source_that_did",),
    ),
    Fault(
        "nobody reads a ledger while a submission is written",
        "node/storage/ledger.py",
        "yield self._large",
        "yield self._db",
        ("test_a_ledger_is_read_while_a_large_row_is_written",),
    ),
    Fault(
        "a submission whose sender left is not queued",
        "node/trainer/submissions.py",
        "return await asyncio.shield(keeping)",
        "return await keeping",
        (
            "test_the_loop_goes_on_while_a_submission_is_written_and_what_is_durable_is_queued_in_order",
        ),
    ),
    Fault(
        "sessions of keys that left are kept",
        "node/trainer/sessions.py",
        "for node in [node for node, session in self._sessions.items() if session.connection.closed]:",
        "for node in []:",
        ("test_a_closed_connection_is_let_go_at_the_next_sweep_and_a_living_one_is_kept",),
    ),
    Fault(
        "a connection that ended waits for the garbage collector",
        "node/p2p/iroh.py",
        "self._accepting = None\nraise self._lost(cause(error)) from error",
        "raise self._lost(cause(error)) from error",
        ("test_a_connection_that_ended_goes_at_once_and_waits_for_no_collector",),
    ),
    Fault(
        "whoever gives nothing keeps its place in a fetch",
        "node/p2p/download.py",
        "giving = sum(fetch.state.gives(peer, now) for peer in known)",
        "giving = len(known)",
        ("test_twenty_of_forty_neighbours_that_do_their_worst_do_not_double_the_time_of_a_fetch",),
    ),
    Fault(
        "a text that comes again counts in a mean",
        "node/verification/verifier.py",
        "measures = structs.replace(measures, means=())",
        "pass",
        ("test_a_text_that_comes_again_has_no_means_and_no_verdict_tells_them",),
    ),
    Fault(
        "a validator alone bans by means",
        "node/trainer/pipeline_faults.py",
        "counts = evidence.means and not audits.validator",
        "counts = evidence.means",
        ("test_means_that_a_validator_states_do_not_count",),
    ),
    Fault(
        "differences of logprobs lose their sign in a mean",
        "node/verification/measures.py",
        "apart, middle = np.clip(stated - own, -CLIP, CLIP), (stated + own) / 2",
        "apart, middle = np.clip(np.abs(stated - own), -CLIP, CLIP), (stated + own) / 2",
        ("test_means_of_logprobs_keep_their_sign_and_tell_a_temperature",),
    ),
    Fault(
        "bounds of means are those of single readings",
        "node/verification/envelope.py",
        "windows = rows[-count * WINDOW :].reshape(count, WINDOW, -1).mean(axis=1)",
        "windows = rows[-count * WINDOW :].reshape(count, WINDOW, -1)[:, 0]",
        (
            "test_means_have_bounds_once_there_are_four_windows_of_readings",
            "test_a_temperature_that_no_rollout_shows_is_in_the_mean_of_sixteen",
        ),
    ),
    Fault(
        "whoever sends a byte now and then keeps its place in a fetch",
        "node/p2p/download_state.py",
        "return download.received >= due and not self._late(download, now)",
        "return not self._late(download, now)",
        ("test_no_ploy_is_worse_than_all_of_them",),
    ),
    Fault(
        "who gave nothing in a short fetch is among the first of the next",
        "node/p2p/peers.py",
        "elif idle:",
        "elif idle and seconds > 2.0:",
        (
            "test_a_source_that_gave_nothing_in_a_short_fetch_comes_last_in_the_next_and_is_not_passed_over",
        ),
    ),
    Fault(
        "a source that gave nothing ends the lines at those that did",
        "node/p2p/download_state.py",
        "rivals = [other for other in others if self._has_delivered(other.source) or not proven]",
        "rivals = others",
        ("test_a_source_that_gave_nothing_yet_keeps_no_chunk_from_one_that_did",),
    ),
    Fault(
        "a refusal ends the time that a source owes a chunk",
        "node/p2p/download_state.py",
        "if not failed and not account.requests:",
        "if not account.requests:",
        ("test_lines_that_end_below_the_limit_add_up",),
    ),
    Fault(
        "a line has no end",
        "node/p2p/chunk_client.py",
        "if now - begun > line_s:",
        "if False:",
        ("test_a_line_ends_after_a_time_and_to_be_in_it_is_no_progress",),
    ),
    Fault(
        "a line over TCP has no end",
        "node/p2p/chunk_client.py",
        "if beats >= MAX_BEATS or time.monotonic() - begun > LINE_S:",
        "if False:",
        ("test_over_tcp_too_a_line_ends_after_a_time_and_counts_as_busy",),
    ),
    Fault(
        "over TCP the trainer waits for others",
        "node/p2p/chunk_client.py",
        "slots = self._trainer_slots if peer == self._trainer else self._slots",
        "slots = self._slots",
        ("test_over_tcp_no_line_at_others_keeps_us_from_the_trainer",),
    ),
    Fault(
        "claims of others keep a chunk from the origin for ever",
        "node/p2p/download_state.py",
        "return now - since > self.patience + self._allowance",
        "return False",
        ("test_the_origin_may_be_asked_for_a_chunk_in_three_lines_while_others_claim_it_too",),
    ),
    Fault(
        "to be in line at the origin counts as nothing",
        "node/p2p/download.py",
        "last = max(self._heard, fetch.progressed)",
        "last = fetch.progressed",
        ("test_a_crowd_that_waits_in_line_for_longer_than_for_the_dead_gets_every_chunk",),
    ),
    Fault(
        "a line at a neighbour counts as nothing",
        "node/p2p/download.py",
        "failing = since is not None and now - max(since, last, fetch.heard) > GIVE_UP_S",
        "failing = since is not None and now - max(since, last) > GIVE_UP_S",
        ("test_a_line_at_a_neighbour_is_waited_for_when_the_origin_is_gone",),
    ),
    Fault(
        "silent neighbours keep a newcomer from the trainer",
        "node/worker/weight_sync.py",
        "if now >= until:",
        "if False:",
        ("test_a_silent_neighbour_is_passed_over_for_a_while",),
    ),
    Fault(
        "a neighbour may answer without end",
        "node/worker/weight_sync.py",
        "while after < newest and time.monotonic() < until:",
        "while after < newest:",
        ("test_neighbours_that_answer_late_with_little_are_not_asked_without_end",),
    ),
    Fault(
        "to be in line counts as progress",
        "node/p2p/chunk_client.py",
        "now = download.heard = time.monotonic()\nif isinstance(reply, ChunkFollows):",
        "now = download.heard = download.touched = time.monotonic()\nif isinstance(reply, ChunkFollows):",
        ("test_a_line_ends_after_a_time_and_to_be_in_it_is_no_progress",),
    ),
    Fault(
        "who lets fetches wait is chosen again",
        "node/p2p/download.py",
        "return self.scores.shunned(peer, now) or self.scores.passed_over(peer, now)",
        "return self.scores.shunned(peer, now)",
        ("test_whoever_lets_versions_wait_again_and_again_is_not_asked_for_the_next",),
    ),
    Fault(
        "an older record replaces a newer one",
        "node/p2p/peers.py",
        "if time.time() < peer.record_until and expires < peer.record_until:",
        "if False:",
        ("test_an_older_record_of_a_node_does_not_replace_its_newer_address",),
    ),
    Fault(
        "byte limit of an upload is lifted",
        "node/p2p/uploads.py",
        "if offer.size > min(limit, MAX_SUBMISSION):",
        "if False:",
        ("test_an_upload_that_drips_is_cut_off_and_an_honest_one_is_not",),
    ),
    Fault(
        "rate limit of gossip is lifted",
        "node/p2p/limits.py",
        "if not self._neighbours.take(neighbour, now):",
        "if False:",
        ("test_a_neighbour_may_hand_over_its_burst_and_then_its_rate",),
    ),
    Fault(
        "uploads that broke off make no room",
        "node/p2p/uploads.py",
        "broken = [(upload.touched, name) for name, upload in partials if upload.stream is None]",
        "broken = []",
        ("test_uploads_that_broke_off_keep_no_peer_from_sending_others",),
    ),
    # -- verification
    Fault(
        "routes are not replayed in training",
        "node/training/experts.py",
        "self.routes = whole.transpose(0, 1).long()",
        "self.routes = None",
        ("test_other_routes_are_those_of_a_reference_with_gradients_to_the_router",),
    ),
    Fault(
        "rollouts of all environments are audited at one temperature",
        "node/verification/auditor.py",
        "temperature=sampling.temperature,",
        "temperature=1.0,",
        ("test_a_rollout_at_another_environments_temperature_is_fraud_and_at_its_own_is_not",),
    ),
    Fault(
        "a reply may go on behind a stop string",
        "node/environments/policies.py",
        "completion = self._strings.cut(completion)",
        "pass",
        ("test_replies_end_at_their_first_stop_string_and_nowhere_else",),
    ),
    Fault(
        "audits do not repeat what top_p and top_k leave",
        "node/inference/sampler.py",
        "narrowed = limits and limits.narrowed(rows, tokens.device)",
        "narrowed = None",
        ("test_replies_under_another_top_p_than_the_leases_are_rejected",),
    ),
    Fault(
        "supports are not audited",
        "node/inference/sampler.py",
        "margins = torch.maximum(margins, least)",
        "pass",
        ("test_wider_and_narrower_supports_are_caught_within_16_rollouts",),
    ),
    Fault(
        "the trainer's logprobs are over all tokens where draws were truncated",
        "node/training/packing.py",
        "rows[masks, : stated.shape[1]] = stated",
        "pass",
        ("test_the_first_step_after_a_truncated_draw_has_ratios_of_1",),
    ),
    Fault(
        "experts that a router did not choose are no fault of a route",
        "node/models/routers.py",
        "outside = ~(claimed[:, :, None] == own[:, None, :]).any(2) & (claimed >= 0)",
        "outside = claimed < 0",
        ("test_routes_that_were_not_taken_are_rejected",),
    ),
    Fault(
        "vLLM measures a route by another token of its step",
        "node/inference/vllm_prefill.py",
        "compared = self._compared(rows[routed], claims[routed])",
        "compared = self._compared(rows[routed] + 1, claims[routed])",
        ("test_routes_are_compared_with_the_choice_for_the_token_before",),
    ),
    Fault(
        "rollout of an older policy than its lease asks for is accepted",
        "node/verification/checks.py",
        "if branch.policy_first < lease.min_version:",
        "if False:",
        ("test_a_lease_cannot_be_answered_for_a_policy_before_it",),
    ),
    Fault(
        "measurement that is not a number passes an audit",
        "node/verification/judgement.py",
        "if not getattr(evidence, name) <= getattr(bounds, name):",
        "if getattr(evidence, name) > getattr(bounds, name):",
        ("test_a_measurement_that_is_no_number_is_above_every_bound",),
    ),
    Fault(
        "fault found in an audit does not extend it to the whole submission",
        "node/verification/verifier.py",
        "places = {scored.place for scored in sample}",
        "places = {scored.place for scored in passed}",
        ("test_where_an_audit_fails_what_was_not_picked_is_not_accepted_either",),
    ),
    Fault(
        "copies are looked for in the event loop",
        "node/verification/verifier.py",
        "faults = await asyncio.to_thread(look, portion)",
        "faults = look(portion)",
        ("test_the_loop_goes_on_while_copies_are_looked_for",),
    ),
    Fault(
        "bundles are unpacked in the event loop",
        "node/verification/verifier.py",
        """checked = await asyncio.to_thread(
            check_submission, work.submission, work.lease, self._run, work.version, work.plan
        )""",
        "checked = check_submission(work.submission, work.lease, self._run, work.version, work.plan)",
        ("test_the_loop_goes_on_while_a_bundle_is_unpacked",),
    ),
    Fault(
        "a bundle that is refused lets a copy past its source",
        "node/verification/verdict.py",
        "if self._earlier is None or self._earlier.done():",
        "if not self.over.done():",
        ("test_a_bundle_that_is_refused_at_once_opens_no_way_past_the_one_before",),
    ),
    Fault(
        "a policy that is dropped while copies are looked for is missing at the audit",
        "node/verification/verifier.py",
        "arrival, lease, states = work.arrival, work.lease, work.states",
        "arrival, lease, states = work.arrival, work.lease, self._claimed_states(passed)",
        ("test_what_is_held_when_copies_are_looked_for_is_audited_with_that",),
    ),
    Fault(
        "hashes of texts need no secret",
        "node/verification/duplicates.py",
        'derive("windows of texts", secret, bytes([at])) for at in range(count)',
        'derive("windows of texts", b"", bytes([at])) for at in range(count)',
        ("test_who_does_not_know_the_secret_cannot_say_which_texts_share_a_hash",),
    ),
    Fault(
        "texts that were found again are forgotten first",
        "node/verification/duplicates.py",
        "self._windows.touch(rows[some])",
        "pass",
        ("test_memory_is_bounded_and_the_longest_unmet_go_first",),
    ),
    Fault(
        "rollouts of a stranger make bounds of noise",
        "node/verification/self_calibration.py",
        "if not self.vouched(makers) or numerics in (UNKNOWN, ENVELOPE):",
        "if numerics in (UNKNOWN, ENVELOPE):",
        ("test_a_stranger_never_moves_a_bound",),
    ),
    Fault(
        "texts that no seed decided make the envelope",
        "node/verification/verifier.py",
        "if whole and not first_above(evidence(target.rollout, numbers), reject):",
        "if whole:",
        ("test_a_text_that_no_seed_decided_is_not_read",),
    ),
    Fault(
        "the first submissions are judged before there is an envelope",
        "node/verification/verifier.py",
        "lambda: calibration.bounds_of(ENVELOPE) is not None or not calibration.is_reading",
        "lambda: True",
        ("test_the_first_submissions_are_judged_once_enough_of_them_was_read",),
    ),
    Fault(
        "readings that were compared with no version bound the evidence for another",
        "node/verification/envelope.py",
        "compared = [evidence for evidence in measured if evidence.other_policy]",
        "compared = list(measured)",
        ("test_another_version_weighs_nothing_until_readings_were_compared_with_one",),
    ),
    Fault(
        "the envelope does not follow the policy",
        "node/verification/self_calibration.py",
        "late = version >= self._read_version + RENEW_STEPS",
        "late = False",
        ("test_texts_of_new_versions_are_read_however_few_are_audited",),
    ),
    Fault(
        "a stranger's independent rounding is not allowed for",
        "node/verification/envelope.py",
        "PAIR = sqrt(1 + ROUNDING**2)",
        "PAIR = 1.0",
        ("test_bounds_add_the_noise_of_a_second_rounding_and_are_never_beyond_provisional",),
    ),
    Fault(
        "work of a class that was not measured is learned from",
        "node/verification/verifier.py",
        "if unlearned := work.conditions.unlearned:",
        "if unlearned := '':",
        ("test_what_was_leased_before_its_bounds_were_withdrawn_is_not_learned_from",),
    ),
    Fault(
        "a stranger whose class has no bounds is leased work that is thrown away",
        "node/trainer/workers.py",
        "if self.waits_for_bounds(node):",
        "if False:",
        (
            "test_a_stranger_waits_until_the_operators_worker_has_made_bounds_and_loses_no_work",
            "test_where_all_workers_wait_for_their_noise_to_be_measured_it_says_so",
        ),
    ),
    Fault(
        "eager and compiled engines are of one class",
        "node/inference/numerics.py",
        'ways.append("eager")',
        "pass",
        ("test_options_that_change_every_bit_are_part_of_the_class",),
    ),
    Fault(
        "the embedded engine serves temperatures that vLLM does not",
        "node/api/completions.py",
        "return max(temperature, LOWEST_TEMPERATURE) if temperature else 0.0",
        "return temperature",
        ("test_a_temperature_next_to_zero_is_drawn_as_vllm_draws_it",),
    ),
    Fault(
        "a worker is started again and again on a GPU without room for it",
        "node/launch/launcher.py",
        "hopeless = code in HOPELESS or (crowded and CROWDED in failure)",
        "hopeless = code in HOPELESS",
        ("test_a_worker_for_which_the_gpu_has_no_memory_is_started_again_once",),
    ),
    Fault(
        "a stage of a stranger in a reference's pipeline is not waited for",
        "node/verification/self_calibration.py",
        "return self.bounds_of(own) is None and not self.vouched(makers)",
        "return self.bounds_of(own) is None and not self.vouched(makers[:1])",
        ("test_a_reference_with_a_strangers_stage_waits_like_a_stranger",),
    ),
    Fault(
        "who is leased as one class and sends as another loses no lease by it",
        "node/trainer/bounds_book.py",
        "return known is None or self.is_reference(node) or known.had_bounds(numerics or UNKNOWN)",
        "return True",
        ("test_only_bounds_that_were_withdrawn_excuse_work_that_is_not_learned_from",),
    ),
    Fault(
        "reputation is not persisted",
        "node/storage/ledger.py",
        "for peer, snapshot in (reputations or {}).items():",
        "for peer, snapshot in dict[bytes, bytes]().items():",
        ("test_a_verdict_is_kept_together_with_the_reputations_that_it_changed_or_not_at_all",),
    ),
    Fault(
        "an audit that pays to wait waits for nothing",
        "node/verification/local_audits.py",
        "if len(self._calls) >= ENOUGH_AUDITS or tokens >= BATCH_TOKENS or self._closed:",
        "if True:",
        ("test_after_versions_were_loaded_an_audit_waits_until_there_are_enough",),
    ),
    Fault(
        "audits that had a fault together are made together again",
        "node/verification/local_audits.py",
        "call.is_alone = True",
        "pass",
        ("test_a_text_that_ends_audits_harms_none_but_its_own",),
    ),
    Fault(
        "audits of different weights by one number are made together",
        "node/verification/local_audits.py",
        "if call is first or call.is_alone or not _agree(states, call.states):",
        "if call is first or call.is_alone:",
        ("test_audits_that_mean_different_weights_by_a_version_are_kept_apart",),
    ),
    Fault(
        "rollouts of pipelines are audited by vLLM",
        "node/verification/local_audits.py",
        "staged = [self._both and bool(item.boundaries) for item in items]",
        "staged = [False for item in items]",
        ("test_what_left_a_pipeline_is_measured_by_the_other_auditor",),
    ),
    Fault(
        "items that end the process hold up the auditor for as many restarts",
        "node/verification/local_audits.py",
        "if len(faults) == MOST_DEADLY:",
        "if False:",
        ("test_many_deadly_items_do_not_hold_up_the_auditor_for_long",),
    ),
    Fault(
        "a verdict is given again without what it rejected",
        "node/verification/verifier.py",
        "reject_as_before(work, before)",
        "pass",
        ("test_what_a_verdict_from_before_a_restart_rejected_stays_rejected_and_no_more",),
    ),
    Fault(
        "a report may state measures beyond all bounds",
        "protocol/audits.py",
        "if not all(-MAX_MEASURE <= value <= MAX_MEASURE for value in numbers):  # nor is it NaN",
        "if any(value != value for value in numbers):",
        ("test_a_report_has_one_row_of_numbers_for_each_rollout",),
    ),
    Fault(
        "the version that is published on the way takes away one that is audited",
        "protocol/audits.py",
        "return audited_versions(max_off_policy_steps) + 1",
        "return audited_versions(max_off_policy_steps)",
        ("test_what_may_be_trained_can_be_audited_even_if_a_version_is_published_on_the_way",),
    ),
    # -- validators
    Fault(
        "a rejection counts on a validator's word",
        "node/trainer/audits.py",
        'condemned = {n for n, judged in theirs.items() if judged.outcome != "clean"}',
        "condemned = set[int]()",
        ("test_a_validator_that_was_right_for_long_ends_with_its_first_invented_rejection",),
    ),
    Fault(
        "what could not be measured again counts as the validator says",
        "node/trainer/audits.py",
        "own[n] if n in own else unmeasured if n in condemned else measured",
        "own[n] if n in own else measured",
        ("test_no_worker_is_rejected_on_a_validators_word_while_the_trainer_cannot_audit",),
    ),
    Fault(
        "small evidence of another policy adds up on validators' words",
        "node/trainer/audits.py",
        "loud = self._loud(call, theirs, reported)",
        "loud = set[int]()",
        ("test_evidence_of_another_policy_counts_on_a_validators_word_up_to_a_few_nats",),
    ),
    Fault(
        "a flood of cheats is measured again as a whole",
        "node/trainer/audits.py",
        "sample = set(self._chance.sample(sorted(rejected), min(CONFIRMED_MOST, len(rejected))))",
        "sample = rejected",
        ("test_of_a_flood_of_cheats_a_few_are_measured_again_and_no_other_counts",),
    ),
    Fault(
        "the rest of a job of a lying validator is believed",
        "node/trainer/audits.py",
        "condemned = set(theirs)",
        "pass",
        ("test_a_job_of_a_validator_that_lies_is_measured_by_the_trainer_as_a_whole",),
    ),
    Fault(
        "a worker that was covered for goes to validators again",
        "node/trainer/audits.py",
        "own = call.by_trainer or self._queue.passed(call.node)",
        "own = call.by_trainer",
        ("test_a_worker_that_a_validator_covered_for_is_measured_by_the_trainer_from_then_on",),
    ),
    Fault(
        "records of validators are not kept",
        "node/trainer/audits.py",
        "self._ledger.set(VALIDATORS, encode_records(named))",
        "pass",
        ("test_a_disqualified_validator_stays_so_when_the_trainer_starts_again",),
    ),
    Fault(
        "the validator that asks oftenest gets the jobs",
        "node/trainer/audits.py",
        'others = job.drawn not in (b"", peer) and now < job.open_at',
        "others = False",
        ("test_who_of_several_validators_measures_a_job_is_drawn_and_not_who_asks_oftenest",),
    ),
    Fault(
        "a finished job takes back what a validator's silence cost it",
        "node/trainer/audits.py",
        "validator.missed += 1",
        "pass",
        ("test_a_validator_that_finishes_jobs_between_is_benched_longer_all_the_same",),
    ),
    Fault(
        "a validator that suspects everybody is kept",
        "protocol/validators.py",
        "elif max(self.missing, self.alarming) >= FULL:",
        "elif self.missing >= FULL:",
        ("test_a_validator_that_was_right_for_long_is_not_needed_once_it_suspects_everybody",),
    ),
    # -- environments
    Fault(
        "manifest says where a worker's variables are sent",
        "node/environments/allowed.py",
        "return options.published()",
        "return options",
        ("test_a_manifest_cannot_make_a_worker_send_a_variable_anywhere",),
    ),
    Fault(
        "judge that is down is not waited for",
        "node/environments/judge_model.py",
        "while self._answered < since:",
        "while False:",
        ("test_a_judge_that_does_not_answer_is_waited_for_and_named",),
    ),
    Fault(
        "judge gives a reply that was rejected",
        "node/trainer/leased_replies.py",
        "if number not in rejected",
        "if True",
        ("test_rejected_work_answers_no_request",),
    ),
    Fault(
        "prompt of a lease is not what its task says",
        "node/environments/leased_prompts.py",
        "if branch.token_ids[: len(prompt)] != prompt:",
        "if False:",
        ("test_what_is_not_the_prompt_and_one_reply_is_refused",),
    ),
    Fault(
        "deadline of an environment is ignored",
        "node/environments/policies.py",
        "self._timer.reschedule(loop.time())",
        "pass",
        ("test_code_that_waits_for_ever_ends_at_its_deadline_and_raising_is_an_error",),
    ),
    Fault(
        "what a chat template leaves out is not noticed",
        "node/environments/marks.py",
        "if wanted and not count:",
        "if False:",
        ("test_a_part_that_the_template_loses_or_repeats_is_named",),
    ),
    Fault(
        "workers write the date of the day on which they render",
        "node/environments/chat.py",
        "return {**variables, DATE: date}",
        "return dict(variables)",
        ("test_every_worker_writes_the_date_of_the_run_s_beginning_into_its_prompts",),
    ),
    Fault(
        "earlier reasoning is shown where the run drops it",
        "node/environments/playing.py",
        "self._answer(message) if n < dropped[self._reasoning] else message",
        "message",
        ("test_earlier_reasoning_is_kept_or_dropped_or_begins_a_new_sample",),
    ),
    Fault(
        "code of an environment may open sockets",
        "node/environments/confine.py",
        'refused.append(calls["socket"])',
        "pass",
        ("test_what_a_worker_refuses_costs_its_rollout_and_nothing_else",),
    ),
    Fault(
        "an environment sets the scheduling of its node",
        "node/environments/confine.py",
        'program += _only(calls["sched_setaffinity"], [pid, 0])',
        "pass",
        ("test_no_sandbox_lets_an_environment_reach_its_node_or_the_kernel",),
    ),
    Fault(
        "environment of root keeps its capabilities",
        "node/environments/confine.py",
        "_drop_capabilities()",
        "pass",
        ("test_no_sandbox_lets_an_environment_reach_its_node_or_the_kernel",),
    ),
    Fault(
        "Landlock is made and not entered",
        "node/environments/confine.py",
        "if library.syscall(_RESTRICT_SELF, ruleset, 0):",
        "if False:",
        ("test_what_confines_files_shows_no_key_and_takes_no_file",),
    ),
    Fault(
        "modes of files are changed behind Landlock",
        "node/environments/confine.py",
        "program += _answer(number, 0)",
        "pass",
        ("test_what_confines_files_shows_no_key_and_takes_no_file",),
    ),
    Fault(
        "any environment runs where nothing confines files",
        "node/environments/sandbox.py",
        "if not self.missing or environment in BUNDLED:",
        "if True:",
        ("test_with_neither_only_bundled_environments_run_unless_the_owner_says_limits",),
    ),
    Fault(
        "a node may be debugged by its own user",
        "node/environments/confine.py",
        "_prctl(PR_SET_DUMPABLE, ctypes.c_ulong(0))",
        "pass",
        ("test_a_plain_users_environment_reaches_nothing_either",),
    ),
    Fault(
        "a toolset that cannot be checked is played like any other",
        "node/environments/tools.py",
        "if deterministic and not getattr(toolset, DETERMINISTIC, True):",
        "if False:",
        ("test_tools_that_cannot_be_called_or_checked_are_refused_at_the_start",),
    ),
    Fault(
        "what an environment does outside of its process is not noted",
        "node/environments/trial.py",
        "notes.on = True",
        "pass",
        ("test_what_reaches_out_of_its_process_is_named",),
    ),
    Fault(
        "a bundled environment reads whatever data a run names",
        "node/environments/allowed.py",
        "if module not in READS_DATA:",
        "if True:",
        ("test_a_bundled_environment_that_reads_a_data_set_needs_leave",),
    ),
    Fault(
        "a reversed text without tags is paid",
        "node/environments/tasksets/reverse_text_hub.py",
        'return match.group(1).strip() if match else ""',
        "return match.group(1).strip() if match else reply",
        ("test_a_text_of_a_data_set_is_reversed_in_tags_as_prime_rl_asks_for",),
    ),
    Fault(
        "names of a data set are always sorted by the first part",
        "node/environments/tasksets/alphabet_sort_hub.py",
        "ranked = sorted(known, key=lambda name: _part(name, place))",
        "ranked = sorted(known, key=lambda name: _part(name, 0))",
        ("test_names_of_a_data_set_are_sorted_over_turns_as_prime_rl_asks_for",),
    ),
    Fault(
        "a judge overwrites a reward of its name",
        "node/environments/playing.py",
        'scored = at_hand["trace"].rewards if "trace" in at_hand else {}',
        "scored = {}",
        ("test_a_rollout_with_a_score_that_cannot_be_computed_fails_and_names_it",),
    ),
    Fault(
        "a metric hides the reward of its name",
        "node/environments/playing.py",
        'named[f"metric/{name}" if name in trace.rewards else name] = float(value)',
        "named[name] = float(value)",
        ("test_a_metric_that_has_a_rewards_name_does_not_hide_it",),
    ),
    Fault(
        "a prompt that is too long is leased",
        "node/trainer/scheduler.py",
        "if length < self._longest:",
        "if True:",
        ("test_tasks_whose_prompts_are_too_long_are_not_leased_and_told_once",),
    ),
    Fault(
        "a prompt that is too long ends a run's evaluation",
        "node/evaluation/evaluator.py",
        "if longest < math.inf and len(await environment.prompt(task)) >= longest:",
        "if False:",
        ("test_prompts_that_are_too_long_are_passed_over_and_counted",),
    ),
    Fault(
        "a task that comes again counts twice",
        "node/evaluation/evaluator.py",
        "content = task.content or task.digest",
        "content = bytes([*task.digest, *index.to_bytes(8)])",
        ("test_a_task_that_comes_again_counts_once_before_and_after_a_run",),
    ),
    Fault(
        "a benchmark that nothing is trained on is measured in part",
        "node/evaluation/eval_suite.py",
        'return "eval" if environment.id in self._trained else "all"',
        'return "eval"',
        ("test_held_out_tasks_are_measured_of_what_was_trained_and_all_of_others",),
    ),
    Fault(
        "a unit is as good as another",
        "node/environments/tasksets/math.py",
        "if all(units) and units[0] != units[1]:",
        "if False:",
        ("test_a_unit_may_be_left_out_and_not_be_another",),
    ),
    Fault(
        "nulls that a table filled in are trained",
        "node/sft/rows.py",
        "if columns:",
        "if False:",
        ("test_nulls_of_a_table_are_no_arguments_and_those_of_a_line_are",),
    ),
    Fault(
        "tool schemas under verifiers' name are not read",
        "node/sft/rows.py",
        'TOOLS = ("tools", "tool_defs")',
        'TOOLS = ("tools",)',
        ("test_schemas_in_tool_defs_are_used_where_tools_are_lacking",),
    ),
    # -- api
    Fault(
        "key of a request is not compared",
        "node/api/server.py",
        'if not hmac.compare_digest(sent, self._key) or scheme.lower() != "bearer":',
        'if scheme.lower() != "bearer":',
        ("test_with_a_key_nobody_without_it_gets_more_than_the_health",),
    ),
    # -- tickets
    Fault(
        "a page that a ticket came from hands out that of another run",
        "node/app/tickets.py",
        "if ticket.run != leaders.run:",
        "if False:",
        ("test_a_ticket_that_is_read_again_counts_if_a_leader_of_the_same_run_signed_it",),
    ),
    # -- the page
    Fault(
        "the world reads what a peer calls its role",
        "node/ops/figures.py",
        "known = [row for row in figures.peers if row.role in ROLES]",
        "known = figures.peers",
        ("test_a_peer_is_shown_if_there_is_a_role_like_its_own",),
    ),
    Fault(
        "page answers without its token",
        "node/ops/dashboard.py",
        'if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._token.encode()):',
        'if scheme.lower() != "bearer":',
        ("test_without_the_token_nothing_is_told",),
    ),
    Fault(
        "page answers under any name",
        "node/ops/dashboard.py",
        "if not is_local(request.host):",
        "if False:",
        ("test_another_page_gets_nothing_even_with_the_token",),
    ),
    Fault(
        "a viewer that does not read is kept",
        "node/ops/dashboard.py",
        "async with asyncio.timeout(self._limits.read_s):",
        "async with asyncio.timeout(None):",
        ("test_a_viewer_that_does_not_read_is_dropped_and_keeps_nobody_waiting",),
    ),
    Fault(
        "garbage is looked for when it is a quarter of all libraries",
        "node/process/heap.py",
        "gc.freeze()\ngc.collect()",
        "gc.freeze()",
        ("test_garbage_that_lived_for_a_while_is_found_however_much_is_frozen",),
    ),
    Fault(
        "locks of dials are kept for ever",
        "node/p2p/connections.py",
        "self._locks = WeakValueDictionary[Key, asyncio.Lock]()",
        "self._locks = dict[Key, asyncio.Lock]()",
        ("test_a_node_that_is_not_there_any_more_leaves_nothing_but_a_bounded_pause",),
    ),
    Fault(
        "processes that ran are not looked at again",
        "node/environments/hosted.py",
        "return bool(clocks) and all(cpu_clock(pid) == before for pid, before in clocks.items())",
        "return bool(clocks)",
        ("test_processes_that_do_not_run_are_not_looked_at_again",),
    ),
    Fault(
        "a connection that asks nothing is kept",
        "node/ops/http.py",
        "if until > loop.time():",
        "if until:",
        ("test_a_connection_that_makes_no_whole_request_ends",),
    ),
    Fault(
        "a flood of connections takes the places of all",
        "node/ops/http.py",
        "self._end(max(self._idle, key=lambda each: counts[self._addresses[each]]))",
        "self._end(transport)",
        ("test_who_opens_all_connections_and_says_nothing_keeps_nobody_else_out",),
    ),
    Fault(
        "curves grow with the run",
        "node/ops/metrics.py",
        "elif len(self._points) > MAX_POINTS:",
        "elif len(self._points) > 1e9:",
        ("test_curves_of_a_long_run_are_bounded_and_still_show_its_beginning_and_its_newest_step",),
    ),
    Fault(
        "workers that are silent count as working",
        "node/ops/figures.py",
        "if self.silent_s:",
        "if False:",
        ("test_a_trainer_tells_of_its_run_and_counts_its_workers_by_state",),
    ),
    # -- limits of a home
    Fault(
        "a paused worker asks for leases",
        "node/worker/loop.py",
        "waits = fault or paused or self._unkept or self._weights.order < self._catch_up",
        "waits = fault or self._unkept or self._weights.order < self._catch_up",
        (
            "test_a_paused_worker_finishes_what_it_holds_keeps_its_place_and_goes_on_when_it_is_resumed",
        ),
    ),
    Fault(
        "a pause does not outlive its node",
        "node/ops/limits.py",
        "self._kept.paused, self._kept.until = True, None if seconds is None else now + seconds",
        "self.why = OWNER",
        ("test_a_pause_of_its_owner_outlives_a_restart_and_ends_by_its_time_or_word",),
    ),
    Fault(
        "each reading of others counts at once",
        "node/ops/limits.py",
        "wait_s = 0.0 if self._first else FREE_AFTER_S if self.used else USED_AFTER_S",
        "wait_s = 0.0",
        ("test_peaks_and_short_rests_change_nothing",),
    ),
    Fault(
        "the month's bytes end nothing",
        "node/ops/limits.py",
        "if self._used >= 1.0:",
        "if self._used > 1e9:",
        ("test_the_last_tenth_of_a_month_s_bytes_is_for_its_own_work_and_then_it_is_paused",),
    ),
    Fault(
        "a slow line serves as many at once as a fast one",
        "node/p2p/limits.py",
        "return max(1, min(most, int(self.rate / least))) if self.rate else most",
        "return most",
        ("test_what_a_slow_line_serves_to_many_at_once_comes_at_its_rate_and_breaks_off_nowhere",),
    ),
    Fault(
        "chunks go before submissions",
        "node/p2p/serve.py",
        "most = 0 if self._pacer.is_taken else self._pacer.sharers(LEAST_RATE, MAX_UPLOADS)",
        "most = self._pacer.sharers(LEAST_RATE, MAX_UPLOADS)",
        ("test_a_chunk_waits_while_a_submission_of_ours_has_the_line_and_says_so_meanwhile",),
    ),
    # -- storage
    Fault(
        "chunk that was damaged on the disk is handed out",
        "node/storage/chunk_store.py",
        "if data is not None and digest(data) == name:",
        "if data is not None:",
        ("test_corrupt_file_is_deleted_and_can_be_put_again",),
    ),
    Fault(
        "file is renamed before its bytes are on the disk",
        "node/storage/chunk_store.py",
        "disk.write(temporary, parts)\ndisk.rename(temporary, path)",
        "disk.write(path, parts)",
        (
            "test_data_is_synced_before_its_name_and_the_name_before_the_answer",
            "test_death_between_any_two_writes_loses_nothing_acknowledged",
        ),
    ),
    Fault(
        "an environment that rests is not started again",
        "node/environments/hosted.py",
        "if self._rests or child.lost.is_set():",
        "if child.lost.is_set():",
        ("test_a_process_that_nobody_needs_ends_until_the_next_request",),
    ),
    Fault(
        "a verdict that found a fault makes room like one that found none",
        "node/storage/ledger.py",
        '"DELETE FROM verdicts WHERE clean AND arrival <= ?"',
        '"DELETE FROM verdicts WHERE arrival <= ?"',
        (
            "test_a_verdict_that_found_no_fault_makes_room_once_every_checkpoint_contains_its_submission",
        ),
    ),
    Fault(
        "lock of the ledger is not taken",
        "node/storage/ledger.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        ("test_a_second_node_is_refused_and_a_reader_is_not",),
    ),
    Fault(
        "ledger is opened without SQLite's check",
        "node/storage/ledger.py",
        'if result != "ok":',
        "if False:",
        ("test_a_ledger_whose_rows_and_indices_differ_is_refused_with_what_to_do",),
    ),
    Fault(
        "damaged row of a ledger is handed out",
        "node/storage/ledger.py",
        "if name is None or digest_of(data) == bytes(name):",
        "if True:",
        ("test_a_row_with_a_changed_bit_is_reported_once_and_the_others_are_read",),
    ),
    Fault(
        "text that is no UTF-8 is no damage",
        "node/errors.py",
        "BAD_FILE = (OSError, ValueError, RecursionError)",
        "BAD_FILE = (OSError,)",
        ("test_a_damaged_file_of_any_kind_is_mended_or_named_in_one_line",),
    ),
    Fault(
        "damaged file of the model is not fetched again",
        "node/app/peer_node.py",
        "await asyncio.to_thread(services.store.get, chunk.digest)  # drops a damaged one",
        "raise LostChunk(chunk.digest.hex())",
        ("test_a_damaged_file_of_any_kind_is_mended_or_named_in_one_line",),
    ),
    # -- processes, operation
    Fault(
        "NaN is written into JSON",
        "node/ops/strict_json.py",
        "return value if math.isfinite(value) else None",
        "return value",
        ("test_what_is_no_number_is_written_as_null_wherever_it_is_nested",),
    ),
    Fault(
        "children of a killed process are left running",
        "node/process/spawn.py",
        "os.killpg(pid, signal.SIGKILL)",
        "os.kill(pid, signal.SIGKILL)",
        ("test_stopping_a_child_ends_its_own_children",),
    ),
    Fault(
        "control socket is open to every user",
        "node/ops/control.py",
        "self._path.chmod(0o600)",
        "self._path.chmod(0o666)",
        ("test_a_control_socket_is_its_owners_alone_whatever_the_umask",),
    ),
    Fault(
        "an engine that is not installed is found when the run has begun",
        "node/app/daemon.py",
        'if config.type == "vllm" and not is_installed():',
        "if False:",
        (
            "test_an_engine_that_is_not_installed_is_named_before_anything_is_sent",
            "test_a_vllm_that_is_needed_and_not_installed_is_named_before_anything_is_made",
        ),
    ),
    Fault(
        "a port that is taken is found when the node begins",
        "cli/command.py",
        'if port.state == "problem":',
        "if False:",
        (
            "test_a_port_that_is_taken_is_named_before_anything_is_sent",
            "test_a_port_that_is_taken_is_found_before_anything_is_made",
        ),
    ),
    Fault(
        "groups of one are trained",
        "cli/command.py",
        "if environment.group_size < 2:",
        "if False:",
        ("test_groups_of_one_are_refused_as_nothing_is_learned_from_them",),
    ),
    Fault(
        "prompts that leave no room begin a run",
        "node/app/startup.py",
        "if min(lengths) >= longest:",
        "if False:",
        ("test_prompts_that_leave_no_room_for_a_reply_are_refused",),
    ),
    Fault(
        "replies that end early are not told",
        "node/app/startup.py",
        "if max(lengths) + reply > longest and reply < longest - 1:",
        "if False:",
        ("test_replies_that_end_before_their_limit_are_reported_before_the_first_step",),
    ),
    Fault(
        "a warm-up of nothing goes on",
        "node/app/startup.py",
        "if left_out >= enough and not fits:",
        "if False:",
        ("test_a_warm_up_whose_demonstrations_are_all_too_long_is_refused_in_its_first_step",),
    ),
    Fault(
        "a closed terminal kills",
        "cli/command.py",
        "numbers.append(signal.SIGHUP)",
        "pass",
        ("test_the_first_signal_stops_in_order",),
    ),
    Fault(
        "a closed terminal stops what ignores it",
        "cli/command.py",
        "if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:",
        "if True:",
        ("test_under_nohup_the_work_goes_on_when_the_terminal_closes",),
    ),
    Fault(
        "a line to a terminal that is gone cuts the end short",
        "cli/command.py",
        "if error.errno != errno.EIO:",
        "if True:",
        ("test_under_nohup_the_work_goes_on_though_its_terminal_is_gone",),
    ),
    Fault(
        "a command with closed streams prints to none",
        "cli/main.py",
        "if getattr(sys, name) is None:",
        "if False:",
        ("test_a_command_whose_streams_are_closed_does_its_work",),
    ),
    Fault(
        "workers leave at the manifest's last step though the trainer goes on",
        "node/p2p/heads.py",
        "if version == last and time.monotonic() - self.unwatched_since >= FAREWELL_S:",
        "if version == last:",
        ("test_the_last_version_of_the_manifest_is_the_end_only_without_a_trainer",),
    ),
    # -- what is removed, and weights that are ruined
    Fault(
        "--clean removes files that no run writes",
        "node/storage/run_files.py",
        "return re.fullmatch(_RUN, path) is not None",
        "return True",
        ("test_clean_takes_what_a_run_writes_and_names_what_it_leaves",),
    ),
    Fault(
        "a link is removed with a run",
        "node/removal.py",
        "elif (stat.S_ISLNK(mode) and not links) or not known(path):",
        "elif not known(path):",
        ("test_no_link_is_followed",),
    ),
    Fault(
        "a run begins where it writes over a user's files",
        "node/storage/run_files.py",
        "if not goes_on and not is_run(run_dir):",
        "if False:",
        ("test_a_run_does_not_begin_where_it_would_write_over_a_users_files",),
    ),
    Fault(
        "a run's name leads to another directory",
        "node/config/paths.py",
        'if not name or name in (".", ".."):',
        "if not name:",
        ("test_a_runs_name_is_one_directory",),
    ),
    Fault(
        "a run is cleaned while it goes on with its data elsewhere",
        "node/app/daemon.py",
        "with nullcontext() if PARENT_VARIABLE in os.environ else held(config.run_dir):",
        "with nullcontext():",
        ("test_a_run_that_goes_on_is_not_cleaned_wherever_its_data_are",),
    ),
    Fault(
        "stop ends the first of several nodes",
        "cli/command.py",
        "if len(choices) == 1:",
        "if choices:",
        ("test_of_several_nodes_none_is_stopped_unless_one_is_named",),
    ),
    Fault(
        "skipped steps never end a run",
        "node/training/skipped_steps.py",
        "return self.in_a_row + self._empty >= MAX_SKIPPED",
        "return False",
        ("test_a_row_of_skipped_steps_ends_a_run_and_a_single_one_does_not",),
    ),
    Fault(
        "the last good checkpoint is dropped while steps are skipped",
        "node/training/checkpoint.py",
        "if step in good[-1:]:",
        "if False:",
        ("test_the_last_good_checkpoint_is_kept_and_named",),
    ),
    Fault(
        "ruined weights are exported",
        "node/training/optimizer.py",
        "return bool(largest <= torch.finfo(torch.bfloat16).max)",
        "return True",
        ("test_ruined_weights_are_neither_saved_nor_published_nor_exported",),
    ),
    Fault(
        "a worker that cannot keep its work asks for more",
        "node/worker/loop.py",
        "waits = fault or paused or self._unkept or self._weights.order < self._catch_up",
        "waits = fault or paused or self._weights.order < self._catch_up",
        ("test_a_worker_that_cannot_keep_its_work_takes_no_more_leases_and_says_why",),
    ),
    Fault(
        "metrics hold numbers that JSON does not have",
        "node/ops/metrics.py",
        'self._file.write(to_json(line) + "\\n")',
        'self._file.write(json.dumps(line) + "\\n")',
        ("test_metrics_are_json_whatever_the_numbers",),
    ),
)


class NotFound(Exception):
    """The text of a fault is nowhere, or in several places."""


def find(fault: Fault, root: Path) -> tuple[Path, re.Match[str]]:
    """Find the one place in the tree at `root` where a fault goes. Raises NotFound."""
    lines = [re.escape(line.strip()) for line in fault.old.splitlines()]
    pattern = re.compile(r"^([ \t]*)" + r"\n[ \t]*".join(lines) + r"$", re.MULTILINE)
    named = root / fault.path
    if named.is_file() and len(found := list(pattern.finditer(named.read_text()))) == 1:
        return named, found[0]
    files = [file for folder in PACKAGE for file in sorted((root / folder).rglob("*.py"))]
    places = [(file, match) for file in files for match in pattern.finditer(file.read_text())]
    if len(places) != 1:
        where = ", ".join(str(file.relative_to(root)) for file, _ in places) or "nowhere"
        raise NotFound(f"its text is to be found once and is in: {where}")
    return places[0]


def place_of(fault: Fault) -> str:
    """Say where a fault goes in the working tree."""
    try:
        return str(find(fault, ROOT)[0].relative_to(ROOT))
    except NotFound as error:
        return f"NOT FOUND: {error}"


@contextmanager
def planted(fault: Fault, root: Path) -> Generator[Path]:
    """Have a fault in the tree at `root` for the block; gives the changed file. Raises NotFound."""
    file, match = find(fault, root)
    text, stat = file.read_text(), file.stat()
    new = "\n".join(match.group(1) + line for line in fault.new.splitlines())
    file.write_text(text[: match.start()] + new + text[match.end() :])
    try:
        yield file
    finally:
        file.write_text(text)
        os.utime(
            file, (stat.st_atime, stat.st_mtime)
        )  # else Python may go on with what it compiled


def named_tests(fault: Fault, root: Path) -> list[str]:
    """Find the pytest ids of the functions that a fault names; functions that are gone are left out."""
    return [
        f"{file.relative_to(root)}::{name}"
        for name in fault.tests
        for file in test_files(root)
        if re.search(rf"^(?:async )?def {name}\(", file.read_text(), re.MULTILINE)
    ]


def importers(file: Path, root: Path) -> list[str]:
    """List the test files that import a module of the package, the ones that import little first."""
    dotted = "primerl." + file.relative_to(root).with_suffix("").as_posix().replace("/", ".")
    package, _, module = dotted.rpartition(".")
    named = re.compile(
        rf"^\s*(?:from {re.escape(dotted)} import|import {re.escape(dotted)}\b|"
        rf"from {re.escape(package)} import (?:\([^)]*|.*)\b{module}\b)",
        re.MULTILINE,
    )
    found = [one for one in test_files(root) if named.search(one.read_text())]
    # a unit test imports less than a test of whole nodes: it runs first
    found.sort(key=lambda one: len(re.findall(r"^from primerl", one.read_text(), re.MULTILINE)))
    return [str(one.relative_to(root)) for one in found]


def test_files(root: Path) -> list[Path]:
    """List all files of tests."""
    return sorted((root / "tests").rglob("test_*.py"))


def left_out(folder: str, names: list[str]) -> set[str]:
    """Choose what of a folder is not copied."""
    if Path(folder) == ROOT:
        return {name for name in names if name in LEFT_OUT or name.startswith(".")}
    return {"__pycache__"}


class Trees:
    """Copies of the working tree, one for each job."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            root = folder / str(number)
            shutil.copytree(ROOT, root, symlinks=True, ignore=left_out)
            (root / "build").mkdir()
            (root / "build" / "primerl").symlink_to("..")  # `import primerl` is the copy
            self._free.put(root)

    def judge(self, fault: Fault) -> Verdict:
        """Plant a fault in a free copy, run the tests that ought to catch it, and restore the file."""
        root, began = self._free.get(), time.monotonic()
        place, caught, trouble = fault.path, list[str](), "no test imports the module"
        try:
            with planted(fault, root) as file:
                place = str(file.relative_to(root))
                for selection, limit_s in selections(fault, file, root):
                    caught, trouble = run_tests(selection, root, limit_s)
                    if caught:
                        break
        except NotFound as error:
            trouble = str(error)
        finally:
            self._free.put(root)
        seconds = round(time.monotonic() - began, 1)
        return Verdict(fault.name, place, caught, seconds, trouble)

    def check_clean(self, tests: list[str]) -> list[str]:
        """Run tests without a fault; return the failures, or why they are not known."""
        root = self._free.get()
        try:
            failed, trouble = run_tests(tests, root, CLEAN_S, stop_at_first=False)
            return failed or ([] if trouble == SURVIVED else [trouble])
        finally:
            self._free.put(root)


def selections(fault: Fault, file: Path, root: Path) -> Iterator[tuple[list[str], int]]:
    """Yield what to run until something fails, and for how many seconds at most."""
    if named := named_tests(fault, root):
        yield named, NAMED_S
    if others := importers(file, root):
        yield others, IMPORTERS_S


def run_tests(
    selection: list[str], root: Path, limit_s: int, *, stop_at_first: bool = True
) -> tuple[list[str], str]:
    """Run pytest in the tree at `root`; returns the ids that failed, or why no verdict is possible."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    command += [f"--timeout={TEST_S}", *(["-x"] if stop_at_first else []), *selection]
    if "::" in selection[0]:  # chosen by name: also if CI runs it with the slow ones
        command += ["-m", "not nightly and not gpu"]
    environment = {**os.environ, "PYTHONPATH": str(root / "build"), "COLUMNS": "1000"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    running = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = running.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return [], f"no verdict within {limit_s} s"
    finally:
        if running.returncode is None:  # too slow, or interrupted
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    failed = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
    if running.returncode == FAILED and failed:
        return list(dict.fromkeys(failed)), ""
    if running.returncode == PASSED:
        return [], SURVIVED
    tail = output.strip().splitlines()[-1:] or ["no output"]
    return [], f"pytest ended with {running.returncode}: {tail[0]}"


def print_table(verdicts: list[Verdict]) -> None:
    """Print the verdicts side by side."""
    rows = [("fault", "file", "caught by", "seconds")]
    for one in verdicts:
        caught = ", ".join(test.removeprefix("tests/") for test in one.caught_by)
        rows.append((one.fault, one.file, caught or f"NOT CAUGHT: {one.trouble}", f"{one.seconds}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)))


def main() -> int:
    """Judge the faults that the command line names, all by default; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="faults whose name has this in it"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults that are judged at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there too")
    parser.add_argument("--list", action="store_true", help="print the faults and where they go")
    options = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not options.only or any(part in fault.name for part in options.only)
    ]
    if not chosen:
        parser.error("no fault has such a name: see --list")
    if options.list:
        for fault in chosen:
            print(f"{place_of(fault)}: {fault.name}")
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="primerl-faults-") as folder:
        trees = Trees(Path(folder), options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts: list[Verdict] = []
            for verdict in pool.map(trees.judge, chosen):
                verdicts.append(verdict)
                print(f"{len(verdicts)}/{len(chosen)} {verdict.fault}: ", end="", file=sys.stderr)
                print("caught" if verdict.caught_by else verdict.trouble, file=sys.stderr)
        caught = sorted({test for one in verdicts for test in one.caught_by})
        unsound = trees.check_clean(caught) if caught else []
    print_table(verdicts)
    survivors = [one for one in verdicts if not one.caught_by]
    print(
        f"{len(verdicts) - len(survivors)} of {len(verdicts)} faults caught "
        f"in {time.monotonic() - began:.0f} s"
    )
    for test in unsound:
        print(f"fails without a fault too, and proves nothing: {test}")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in verdicts], indent=2) + "\n")
    return 1 if survivors or unsound else 0


if __name__ == "__main__":
    sys.exit(main())
