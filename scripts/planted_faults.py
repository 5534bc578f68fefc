"""Plants faults in different rooms and says which command notices each: `make test`, only
`make test-all`, or none.

    python scripts/planted_faults.py                 # all of them, in a copy of the tree
    python scripts/planted_faults.py --only sampler --only router
    python scripts/planted_faults.py --list

A fault is a replacement of a text that stands in its file once. Where that text is gone, say so by
mending the fault here: tests/test_planted_faults.py looks for every place. Of each fault the tests
of its rooms run, not all: a fault counts as noticed when one of them fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICK = "not slow and not gpu"
REST = "(slow or soak or hypothesis) and not gpu"
ARGUMENTS = ("-p", "_hypothesis_pytestplugin", "-q", "-x", "--no-header", "--tb=no")


@dataclass(frozen=True)
class Fault:
    """What is wrong, where, and the tests of the rooms it concerns."""

    name: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def plant(self, tree: Path) -> None:
        path = tree / self.file
        text = path.read_text()
        count = text.count(self.before)
        if count != 1:
            raise SystemExit(
                f"error: fault {self.name}: its place stands {count} times in {self.file}, once is "
                f"wanted: {self.before!r}; mend it in scripts/planted_faults.py"
            )
        path.write_text(text.replace(self.before, self.after))

    def remove(self, tree: Path) -> None:
        shutil.copyfile(ROOT / self.file, tree / self.file)


FAULTS = (
    Fault(
        "block manager",
        "cached blocks that are free count as room and as hits at once",
        "quire/engine/block_manager.py",
        "for block in (*match.shared, *match.copied)",
        "for block in match.copied",
        ("tests/engine/test_partial_blocks.py", "tests/engine/test_block_machine.py"),
    ),
    Fault(
        "prefix cache",
        "a collision of hashes is a hit: another request's text",
        "quire/engine/prefix_cache.py",
        "return block if block is not None and same_prefix(block.key, key) else None",
        "return block",
        ("tests/engine/test_prefix_cache.py", "tests/engine/test_key_parts.py"),
    ),
    Fault(
        "scheduler",
        "a prompt that is cut to a graph's size still counts its token as on its way",
        "quire/engine/step_plan.py",
        "                request.num_placeholders -= entry.samples\n",
        "",
        ("tests/engine/test_scheduler.py", "tests/engine/test_core.py"),
    ),
    Fault(
        "sampler",
        "a frequency penalty counts the filling of shorter histories",
        "quire/sampling/penalties.py",
        "table.scatter_add_(0, where.flatten(), inside.flatten().int())",
        "table.scatter_add_(0, where.flatten(), torch.ones_like(where.flatten()).int())",
        ("tests/runner/test_sampler.py", "tests/runner/test_sampling_definition.py"),
    ),
    Fault(
        "runner rows",
        "a row's next request writes its blocks behind those of the last one",
        "quire/runner/request_rows.py",
        "            self._num_blocks[admission.row] = 0\n",
        "            self._num_blocks[admission.row] %= width // 2\n",
        ("tests/runner/test_layer_groups.py", "tests/test_exactness.py"),
    ),
    Fault(
        "recorded steps",
        "replayed steps ignore how many guesses of the step before were wrong",
        "quire/runner/recorded.py",
        "starts = shape.starts if lag is None else shape.starts - lag.numpy()",
        "starts = shape.starts",
        ("tests/test_draft_tokens.py", "tests/speculate"),
    ),
    Fault(
        "graphs",
        "a graph of prompts and decodes writes a token for rows that don't sample",
        "quire/runner/graphs.py",
        "self._padded(np.where(are_sampled, shape.starts + 1, self._max_context_len), 0),",
        "self._padded(shape.starts + 1, 0),",
        ("tests/runner/test_other_device.py", "tests/speculate/test_drawing_graphs.py"),
    ),
    Fault(
        "attention kernel",
        "C++: a row sums the weight of one key behind its own",
        "quire/backends/cpu/attention.h",
        "((key >= begin) & (key < end)) ? s[v]",
        "((key >= begin) & (key <= end)) ? s[v]",
        ("tests/kernels/test_cpu_attention.py",),
    ),
    Fault(
        "linear kernel",
        "C++: a row that is alone is summed in another order",
        "quire/backends/cpu/linear.cpp",
        "for (int64_t k = 0; k < call.depth; k += KC) {\n"
        "      const int64_t k_end = std::min(k + KC, call.depth);",
        "const int64_t piece = call.rows == 1 ? KC / 2 : KC;\n"
        "    for (int64_t k = 0; k < call.depth; k += piece) {\n"
        "      const int64_t k_end = std::min(k + piece, call.depth);",
        ("tests/kernels/test_cpu_kernels.py",),
    ),
    Fault(
        "quantised format",
        "the upper bits of Q4_K's last scales are cut",
        "quire/kernels/formats.py",
        "factors = torch.cat((first & 63, rest & 15 | first >> 2 & 48), 1)",
        "factors = torch.cat((first & 63, rest & 15 | first >> 2 & 16), 1)",
        ("tests/kernels/test_weights.py", "tests/models/test_gguf_file.py"),
    ),
    Fault(
        "loader names",
        "the norm of GGUF's queries is that of the keys",
        "quire/models/names.py",
        '"query_norm": ("self_attn.q_norm", "attn_q_norm")',
        '"query_norm": ("self_attn.q_norm", "attn_k_norm")',
        ("tests/models/test_gguf_models.py",),
    ),
    Fault(
        "detokenizer",
        "a token inside of a character has the text it has alone",
        "quire/frontend/detokenizer.py",
        "self._is_between = not self._strip_space and not self._utf8.getstate()[0]",
        "self._is_between = not self._strip_space",
        ("tests/frontend/test_detokenizer.py",),
    ),
    Fault(
        "stop strings",
        "the last character that may begin a stop string is sent too early",
        "quire/frontend/stop_strings.py",
        "min(automaton.depth[node], len(known))",
        "min(max(automaton.depth[node] - 1, 0), len(known))",
        ("tests/test_stop_strings.py",),
    ),
    Fault(
        "chat template",
        "add_generation_prompt is ignored",
        "quire/frontend/chat_template.py",
        'begins_answer = options.get("add_generation_prompt", True)',
        "begins_answer = True",
        ("tests/frontend/test_chat_template.py",),
    ),
    Fault(
        "tool parser",
        "a closing tag that comes in two pieces is text",
        "quire/frontend/tool_calls/hermes.py",
        "if not END.startswith(text[position:]):",
        "if text[position:] != END:",
        ("tests/frontend/test_tool_calls.py",),
    ),
    Fault(
        "constraint masks",
        "a token drawn for the row's last request advances the grammar of its next",
        "quire/constrain/masks.py",
        "            due &= self._epochs[request_rows] == epochs\n",
        "            pass\n",
        ("tests/constrain",),
    ),
    Fault(
        "speculation",
        "right guesses behind a wrong one are accepted",
        "quire/runner/batch.py",
        "(1 * is_right).cumprod(1).sum(1, dtype=computed.dtype)",
        "(1 * is_right).sum(1, dtype=computed.dtype)",
        ("tests/speculate/test_acceptance.py", "tests/test_draft_tokens.py"),
    ),
    Fault(
        "admission",
        "a request's further answers do not count against the queue",
        "quire/server/guard/admission.py",
        "if before > 0 and before + num_answers > self._most_answers:",
        "if before > 0 and before + 1 > self._most_answers:",
        ("tests/server/test_parts.py", "tests/server/test_overload.py"),
    ),
    Fault(
        "batches",
        "a batch that is resumed cuts off the last answer it had",
        "quire/server/batches/output.py",
        "            done += 1\n            failed += _is_error(written)\n            end += length\n",
        "            done += 1\n            failed += _is_error(written)\n            end = length\n",
        ("tests/server/test_batches.py",),
    ),
    Fault(
        "router",
        "replicas that are equally good don't take turns",
        "quire/server/link/replicas/router.py",
        "self._next = (best + 1) % len(keys)",
        "self._next = best",
        ("tests/server/replicas/test_router.py",),
    ),
    Fault(
        "parallel division",
        "shares overlap where they don't come out even",
        "quire/kernels/shares.py",
        "start = index * each + min(index, more)",
        "start = index * each + min(index, more, 1)",
        ("tests/parallel/test_division.py",),
    ),
    Fault(
        "command line",
        "a settings file goes before what the command says",
        "quire/cli/option_groups.py",
        "for key in own.keys() & section.keys() - given:",
        "for key in own.keys() & section.keys():",
        ("tests/cli/test_options.py",),
    ),
    Fault(
        "key parts",
        "a key says that an adapter or a caller's key ends a token early",
        "quire/engine/prefix_cache.py",
        "size if part.end is None else min(part.end - first, size),",
        "size if part.end is None else min(part.end - first - 1, size),",
        ("tests/engine/test_key_parts.py", "tests/engine/test_prefix_cache.py"),
    ),
    Fault(
        "chunk end",
        "a prompt's chunk may be a token longer than the step's budget",
        "quire/engine/scheduler.py",
        "end = min(request.num_tokens, start + plan.budget)",
        "end = min(request.num_tokens, start + plan.budget + 1)",
        ("tests/engine/test_scheduler.py", "tests/engine/test_scheduler_machine.py"),
    ),
    Fault(
        "min_p",
        "min_p is taken from top_p",
        "quire/sampling/filters.py",
        'np.log(own["min_p"].astype(np.float64))',
        'np.log(own["top_p"].astype(np.float64))',
        ("tests/runner/test_sampler.py", "tests/runner/test_sampling_definition.py"),
    ),
    Fault(
        "last character",
        "a character that no token completes is lost at the end of an answer",
        "quire/frontend/detokenizer.py",
        'return self._utf8.decode(b"", final=True)',
        'return self._utf8.decode(b"", final=False)',
        ("tests/frontend/test_detokenizer.py",),
    ),
    Fault(
        "abort",
        "a call whose client has left goes on in the engine",
        "quire/server/calls/call.py",
        "            self._client.abort([asked.request_id for asked in self._asked])\n",
        "",
        ("tests/server/test_cuts.py", "tests/server/test_concurrency.py"),
    ),
    Fault(
        "header",
        "an error that passes does not say when to come again",
        "quire/server/errors.py",
        'found["retry-after"] = str(max(1, round(self.retry_after)))',
        "pass",
        ("tests/server/test_parts.py", "tests/server/test_quotas.py"),
    ),
    Fault(
        "adapter's blocks",
        "blocks are named by what an adapter is called, not by its content",
        "quire/engine/request.py",
        'KeyPart(f"adapter {self.adapter}")',
        'KeyPart(f"adapter {self.resolved.adapter_name}")',
        ("tests/test_adapters.py", "tests/engine/test_adapter_slots.py"),
    ),
    Fault(
        "adapter's files",
        "new content under an old name is not noticed",
        "quire/frontend/adapters.py",
        "if known is not None and (known.path, known.stamps) == (path, stamps):\n"
        "            self._loaded.move_to_end(name)",
        "if known is not None and known.path == path:\n            self._loaded.move_to_end(name)",
        ("tests/test_adapters.py",),
    ),
    Fault(
        "adapter's scale",
        "rsLoRA is scaled as LoRA",
        "quire/checkpoints/adapter_files.py",
        "alpha / (math.sqrt(rank) if self.rank_stabilized else rank)",
        "alpha / rank",
        ("tests/test_adapters.py", "tests/models/test_adapters_against_peft.py"),
    ),
    Fault(
        "adapter's slot",
        "an adapter that running requests have makes room for another",
        "quire/runner/adapters.py",
        "next(other for other in self._slots if other not in used)",
        "next(iter(self._slots))",
        ("tests/runner/test_adapter_slots.py", "tests/test_adapters_exactness.py"),
    ),
    Fault(
        "adapter's row",
        "a row's next request, which has no adapter, has that of its last one",
        "quire/runner/adapters.py",
        "                del self._owners[row]\n                self._row_slots[row] = NO_ADAPTER\n",
        "                del self._owners[row]\n",
        ("tests/runner/test_adapter_slots.py", "tests/test_adapters_exactness.py"),
    ),
    Fault(
        "adapters of prompts",
        "a token of a prompt has the adapter of the row beside its own",
        "quire/runner/batch.py",
        "adapters[shape.token_owners]",
        "adapters[np.roll(shape.token_owners, 1)]",
        ("tests/test_adapters.py", "tests/test_adapters_exactness.py"),
    ),
    Fault(
        "adapter's rows",
        "C++: rows of one adapter are taken for neighbours",
        "quire/backends/cpu/adapters.cpp",
        "to[r] = out + order[group.first + r] * out_stride;",
        "to[r] = out + (order[group.first] + r) * out_stride;",
        ("tests/kernels/test_cpu_adapters.py",),
    ),
    Fault(
        "adapter in use",
        "an adapter that requests have leaves host memory when another needs the room",
        "quire/frontend/adapters.py",
        "used = self._in_use() | {digest}",
        "used = {digest}",
        ("tests/test_adapters.py",),
    ),
    Fault(
        "adapter's requests",
        "the first of several requests of an adapter that ends, or is preempted, gives its room away",
        "quire/engine/request_table.py",
        "            if not self.adapters[request.adapter]:\n",
        "            if self.adapters[request.adapter] >= 0:\n",
        ("tests/engine/test_adapter_slots.py", "tests/test_adapters.py"),
    ),
    Fault(
        "host tier",
        "a collision of hashes is a hit in host memory: an adapter meets another one's blocks",
        "quire/engine/host_tier.py",
        "return found if found is not None and same_prefix(found[0], key) else None",
        "return found",
        ("tests/engine/test_prefix_cache.py",),
    ),
    Fault(
        "recording's thread",
        "what another thread packs while a step is recorded is made again with every step",
        "quire/backends/cpu/recording.py",
        "if recorded is not None and self._recording_thread == get_ident():",
        "if recorded is not None:",
        ("tests/kernels/test_recording.py",),
    ),
    Fault(
        "adapter's weights",
        "DoRA's norms are those of the files' weights, though others are in their place",
        "quire/runner/adapters.py",
        "if adapter.is_dora and not self._decoder.has_files_weights:",
        "if False:",
        ("tests/test_weights_version.py",),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", action="append", help="a fault's name; may be given again")
    parser.add_argument("--list", action="store_true", help="name them, and run nothing")
    given = parser.parse_args()
    names = given.only or [fault.name for fault in FAULTS]
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        raise SystemExit(f"error: there is no fault {', '.join(sorted(unknown))}; see --list")
    chosen = [fault for fault in FAULTS if fault.name in names]
    if given.list:
        for fault in chosen:
            print(f"{fault.name:20} {fault.file}: {fault.what}")
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copied = ("quire", "tests", "scripts", "docs", "examples", "deploy")
        for name in copied:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"):
            shutil.copy(path, tree)
        unnoticed = [fault.name for fault in chosen if not notices(fault, tree)]
    if unnoticed:
        raise SystemExit(f"error: nobody noticed: {', '.join(unnoticed)}")


def notices(fault: Fault, tree: Path) -> bool:
    """Runs the tests of its rooms, the quick ones first, and prints who fails."""
    fault.plant(tree)
    started = time.monotonic()
    try:
        for command, marks in (("make test", QUICK), ("make test-all", REST)):
            failed = first_failure(fault, tree, marks)
            if failed is not None:
                seconds = time.monotonic() - started
                print(f"{fault.name:20} {command:14} {seconds:5.0f} s  {failed}", flush=True)
                return True
        print(f"{fault.name:20} NOBODY", flush=True)
        return False
    finally:
        fault.remove(tree)


def first_failure(fault: Fault, tree: Path, marks: str) -> str | None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if marks == QUICK:
        environment["QUIRE_QUICK_TESTS"] = "1"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *ARGUMENTS, "-m", marks, *fault.tests],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode in (0, 5):  # 5: there are no such tests
        return None
    lines = run.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if not failed:
        raise SystemExit(f"error: fault {fault.name}: pytest failed:\n{run.stdout}{run.stderr}")
    return failed[0].split(" ", 1)[1].partition(" - ")[0].partition("@")[0]


if __name__ == "__main__":
    main()
