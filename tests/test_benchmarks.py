"""The benchmarks measure what they say: their arithmetic, their cases, and that each part runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import nvfp4_dsmla

sys.path.insert(0, str(Path(__file__).parents[1]))  # `pytest` alone doesn't put the checkout there
from benchmarks import cpu, decode, fused, step, subjects
from benchmarks.cases import Case, DecodeCase, buffer_sets, decode_cases, device_cases
from benchmarks.comparison import Comparison, DecodeComparison, HostCost, StepTime
from benchmarks.report import Report, progress_line
from benchmarks.timing import Timing, count_launches, time_calls, time_loops

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")


def took(us: float) -> Timing:
    return Timing(us=us, low=us, high=us, samples=1)


KNOWN = Comparison(
    benchmark="cache",
    case=Case("write", 1000),
    clock="device",
    threads=None,
    timings={
        subjects.OURS: took(2.0),
        subjects.PLAIN_CALL: took(10.0),
        subjects.COPY: took(1.5),
        subjects.COMPILED: took(30.0),
    },
    launches={subjects.OURS: 1, subjects.COMPILED: 27},
)
KNOWN_DECODE = DecodeComparison(
    case=DecodeCase(heads=64, batch=128, topk=2048),
    clock="device",
    threads=None,
    timings={subjects.OURS: took(100.0), subjects.COPY: took(25.0), subjects.SDPA: took(900.0)},
)
HOST_COST = HostCost("write", "an op", "eager", 0, "cpu", took(3.0))
STEP_TIME = StepTime("nvfp4_ds_mla", "eager", 2, 8, 8192, "cpu", took(4321.0), None)


def test_what_follows_from_known_times() -> None:
    assert KNOWN.percent_of_copy == 75.0
    assert KNOWN.gb_per_s == pytest.approx(1000 * (1152 + 352 + 8) / 2e-6 / 1e9)
    assert KNOWN.times_faster_than == {subjects.COPY: 0.75, subjects.COMPILED: 15.0}


def test_no_copy_no_percentage() -> None:
    alone = Comparison("cpu", Case("write", 1), "host", 1, {subjects.OURS: took(2.0)})
    assert alone.percent_of_copy is None
    assert "copy" not in progress_line(alone)


def test_what_follows_from_a_known_decode() -> None:
    flop = 2 * 64 * 128 * 2048 * (576 + 512)
    assert KNOWN_DECODE.tflops == pytest.approx(flop / 100e-6 / 1e12)
    assert KNOWN_DECODE.record_tb_per_s == pytest.approx(128 * 2048 * 352 / 100e-6 / 1e12)
    assert KNOWN_DECODE.percent_of_floor == pytest.approx(flop / 790e12 / 1e-6)  # of 100 us
    few_heads = DecodeComparison(DecodeCase(16, 128, 2048), "device", None, KNOWN_DECODE.timings)
    assert few_heads.percent_of_floor == 25.0
    assert few_heads.times_faster_than == {subjects.SDPA: 9.0}
    assert progress_line(few_heads).endswith(" = 25% of the floor")


def test_a_padded_decode_reads_less() -> None:
    case = DecodeCase(heads=3, batch=5, topk=10, s_q=2, padded=4)
    assert case.record_bytes == 10 * 6 * 352
    assert case.bytes == 10 * (6 * 352 + 10 * 4 + 3 * (1152 + 1024 + 4))
    assert case.flop == 2 * 10 * 3 * 6 * (576 + 512)


@pytest.mark.parametrize(
    ("case", "bytes_a_token"),
    [
        (Case("write", 7), 1152 + 352 + 8),
        (Case("write", 7, dtype="float32"), 2304 + 352 + 8),
        (Case("fused write", 7), 1152 + 352 + 8 + 8 + 128),
        (Case("gather", 7, requests=16), 1152 + 352),
        (Case("gather", 7), 1152 + 352 + 8),
    ],
)
def test_least_traffic(case: Case, bytes_a_token: int) -> None:
    assert case.bytes == 7 * bytes_a_token


def test_timing_is_the_median_and_the_tenths() -> None:
    timing = Timing.of([float(i) for i in range(100, -1, -1)])
    assert (timing.low, timing.us, timing.high, timing.samples) == (10, 50, 90, 101)
    assert Timing.of([1.0, 2.0]).us == 1.5
    assert Timing.of([4.0]) == took(4.0)


def test_calls_take_turns_over_all_their_buffers() -> None:
    order: list[str] = []

    def call(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    subjects_of = {"a": [call("a0"), call("a1"), call("a2")], "b": [call("b")]}
    timings = time_calls(subjects_of, seconds=0.0)
    assert set(timings) == {"a", "b"}
    warm_up, timed = order[:4], order[4:]
    assert warm_up == ["a0", "a2", "b", "b"]
    assert timed[:6] == ["a0", "b", "a1", "b", "a2", "b"]
    assert timings["b"].samples == len(timed) / 2


def test_loop_time_is_of_one_call() -> None:
    slow = time_loops({"": lambda: sum(range(20_000))}, repeats=3, seconds=0.005)[""]
    fast = time_loops({"": lambda: None}, repeats=3, seconds=0.005)[""]
    assert fast.us < slow.us / 20


def test_every_target_is_among_the_cases() -> None:
    for quick in (False, True):
        cases = device_cases(quick=quick)
        assert len(cases) == len(set(cases))
        for tokens in (64, 8192, 131072):
            assert {Case("write", tokens), Case("gather", tokens, requests=16)} <= set(cases)
        assert {c.layout for c in cases} == {"contiguous", "layer view", "shuffled"}
        assert Case("gather", 131072, requests=256) in cases


@pytest.mark.parametrize("layout", ["contiguous", "layer view", "shuffled"])
@pytest.mark.parametrize("requests", [0, 1, 16])
@pytest.mark.parametrize("tokens", [1, 100])
def test_buffers_are_consistent(tokens: int, requests: int, layout: str) -> None:
    case = Case("gather", tokens, layout, block_size=4, requests=requests)
    for b in buffer_sets(case, CPU, 2):
        starts = [*b.workspace_starts.tolist(), tokens]
        assert starts[0] == 0
        assert starts == sorted(starts)
        lengths = [end - start for start, end in pairwise(starts)]
        slots = [
            nvfp4_dsmla.slot_mapping_from_block_table(
                block_table=b.block_table[r : r + 1], positions=torch.arange(n)[None], block_size=4
            ).flatten()
            for r, n in enumerate(lengths)
        ]
        assert torch.equal(b.slots, torch.cat(slots))
        assert len(set(b.slots.tolist())) == tokens
        assert b.slots.max() < b.cache.shape[-3] * 4
        assert (b.cache.dim() == 4) == (layout == "layer view")
        # What is gathered is there: everywhere else the cache is zero.
        assert (subjects.ours(case, b)() is not None) == (requests == 0)
        subjects.check(case, b)
        assert b.dst.abs().sum() > 0 or requests == 0


@pytest.mark.parametrize("op", ["write", "gather"])
@pytest.mark.parametrize("requests", [0, 16])
def test_fp8_takes_its_own_ops_and_bytes(op: str, requests: int) -> None:
    case = Case(op, 100, requests=requests, format="fp8_ds_mla")
    assert case.bytes == 100 * (1152 + 656 + (0 if requests else 8))
    assert case.name.endswith(", fp8_ds_mla")
    (b,) = buffer_sets(case, CPU, 1)
    assert b.cache.shape[-1] == 656
    subjects.check(case, b)
    assert Case(op, 131072, requests=16 if op == "gather" else 0, format="fp8_ds_mla") in (
        device_cases(quick=True)
    )


def test_decodes_select_each_record_once() -> None:
    for quick in (False, True):
        assert len(decode_cases(quick=quick)) == len(set(decode_cases(quick=quick)))
    assert set(decode.COMPILED_CASES) <= set(decode_cases(quick=False))
    case = DecodeCase(heads=2, batch=3, topk=10, s_q=2, padded=1)
    for b in decode.buffer_sets(case, CPU, 2):
        selected = b.indices[b.indices >= 0]
        assert len(selected.unique()) == len(selected) == case.tokens
        assert b.cache[b.indices[..., 0].long() // 64, b.indices[..., 0].long() % 64].any(-1).all()


def test_the_decodes_baselines_are_the_same_attention() -> None:
    (b,) = decode.buffer_sets(DecodeCase(heads=16, batch=2, topk=64, s_q=2), CPU, 1)
    want, _ = nvfp4_dsmla.sparse_mla_decode(
        q=b.q, kv_cache=b.cache, indices=b.indices, softmax_scale=decode.SCALE
    )
    torch.testing.assert_close(decode.gather_and_sdpa(b)(), want, rtol=2**-6, atol=2**-8)


def test_a_wrong_decode_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = DecodeCase(heads=2, batch=1, topk=10)
    (buffers,) = decode.buffer_sets(case, CPU, 1)
    decode.check(case, buffers)
    right = nvfp4_dsmla.sparse_mla_decode

    def wrong(*, indices: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return right(indices=indices[..., 1:], **arguments)

    monkeypatch.setattr(nvfp4_dsmla, "sparse_mla_decode", wrong)
    with pytest.raises(AssertionError, match="differ"):
        decode.check(case, buffers)


@pytest.mark.parametrize("cache", step.CACHES)
def test_a_wrong_step_is_not_timed(cache: str) -> None:
    (case,) = step.cases(CPU, quick=True)
    decoder = step.filled_decoder(case, cache, CPU)
    steps = step.random_steps(case, CPU)
    assert len(steps) == step.STEPS
    assert max(int(one.seq_lens.max()) for one in steps) <= case.context
    step.check(case, {step.EAGER: decoder, "again": decoder}, steps[0])

    def other(*inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = decoder(*inputs)
        return logits.roll(1, dims=-1)

    with pytest.raises(AssertionError, match="other and eager differ"):
        step.check(case, {step.EAGER: decoder, "other": other}, steps[0])


@pytest.mark.cuda
def test_launches_are_counted(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("launches are CUDA's")
    x = torch.zeros(3, device=device)
    once = count_launches(lambda: x + 1)
    assert count_launches(lambda: x + 1 + x) == once + 1 > 1


def test_a_wrong_op_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("write", 3)
    (buffers,) = buffer_sets(case, CPU, 1)
    subjects.check(case, buffers)
    monkeypatch.setattr(subjects, "ours", lambda *_: lambda: None)
    with pytest.raises(AssertionError, match="differ"):
        subjects.check(case, buffers)


def test_the_unfused_chain_writes_what_the_fused_op_writes() -> None:
    """But where another order of the norm's sum rounds a latent to its neighbour."""
    (inputs,) = fused.input_sets(Case("fused write", 100), CPU, 1)
    fused.check(inputs)
    ours = inputs.write.cache.clone()
    fused.unfused(inputs)
    assert (inputs.write.cache != ours).float().mean() < 0.001
    fused.write_alone(inputs)
    assert (inputs.write.cache != ours).float().mean() > 0.5


def test_a_wrong_fused_op_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (inputs,) = fused.input_sets(Case("fused write", 3), CPU, 1)
    monkeypatch.setattr(fused, "ours", lambda _: None)
    with pytest.raises(AssertionError, match="differ"):
        fused.check(inputs)


@pytest.fixture(scope="module")
def measured() -> Report:
    report = Report()
    for case in (
        Case("write", 3, "shuffled"),
        Case("gather", 3, "shuffled", requests=16),
        Case("gather", 3, "shuffled"),
    ):
        report.add(cpu.measure(case, "cpu", with_reference=False, seconds=0.0))
    fused_case = Case("fused write", 3)
    report.add(fused.measure_on_cpu(fused_case, fused.unfused, seconds=0.0))
    for decode_case in decode.CPU_CASES:
        report.add(decode.measure_on_cpu(decode_case, seconds=0.0))
    report.add(HOST_COST)
    report.add(STEP_TIME)
    return report


def test_the_file_has_what_it_is_to_have(measured: Report, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "results.json"
    measured.save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert set(data) == {"machine", "comparisons", "decodes", "host_costs", "steps"}
    assert {"date", "commit", "torch", "python", "cpu", "cpu_threads"} <= set(data["machine"])
    *cpu_comparisons, of_fused = data["comparisons"]
    assert len(cpu_comparisons) == 3
    assert of_fused["times_faster_than"].keys() == {
        subjects.WRITE_ALONE,
        subjects.UNFUSED_COMPILED,
        subjects.UNFUSED_EAGER,
    }
    for c in cpu_comparisons:
        copy, ours = (c["timings"][name]["us"] for name in (subjects.COPY, subjects.OURS))
        assert c["percent_of_copy"] == pytest.approx(100 * copy / ours)
        assert c["gb_per_s"] == pytest.approx(c["bytes"] / ours / 1e3)
        assert {subjects.COPY, subjects.UNPACKED} == set(c["times_faster_than"])
        assert c["timings"][subjects.OURS]["samples"] >= 7
    assert [c["percent_of_floor"] for c in data["decodes"]] == [None] * len(decode.CPU_CASES)
    assert data["decodes"][0]["times_faster_than"].keys() == {subjects.SDPA}
    assert Report.load(path) == measured


def test_a_file_may_have_no_launches() -> None:
    """As one of before they were counted."""
    data = json.loads(json.dumps(KNOWN.to_json()))
    assert Comparison.from_json(data) == KNOWN
    del data["launches"]
    assert Comparison.from_json(data) == replace(KNOWN, launches={})


def test_the_plot_is_a_png(measured: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plot import draw

    for name, report in {
        "all": measured,
        "host": Report(machine=measured.machine, host_costs=[HOST_COST]),
        "steps": Report(machine=measured.machine, steps=[STEP_TIME]),
        "comparisons": Report(machine=measured.machine, comparisons=[KNOWN]),
        "decodes": Report(machine=measured.machine, decodes=[KNOWN_DECODE]),
    }.items():
        path = tmp_path / f"{name}.png"
        draw(report, path)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(Report(machine=measured.machine), tmp_path / "nothing.png")


def test_the_tables_show_the_numbers(measured: Report) -> None:
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=300)
    report = Report(measured.machine, [KNOWN], [KNOWN_DECODE], [HOST_COST], [STEP_TIME])
    with console.capture() as captured:
        console.print(*report.tables())
    text = captured.get()
    of_cache, of_decode = ("75.0", "15.00", "756", "1 / 27"), ("365.1", "0.923", "46.2", "9.00")
    for number in (*of_cache, *of_decode, "3.00", "4,321"):
        assert f" {number} " in text


def test_the_command_line_prints_a_saved_report(measured: Report, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    testing = pytest.importorskip("typer.testing")
    from benchmarks.__main__ import app

    path = tmp_path / "results.json"
    measured.save(path)
    picture = tmp_path / "results.png"
    result = testing.CliRunner().invoke(app, ["show", str(path), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "gather, 16 requests" in result.output
    assert picture.is_file()
    for command in ("cache", "fused", "decode", "step", "host", "package", "cpu", "all"):
        help_of = testing.CliRunner().invoke(app, [command, "--help"])
        assert help_of.exit_code == 0, help_of.output
