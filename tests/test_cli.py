"""The command line: its screens at 80 columns, its JSON, its files and its exit statuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import nvfp4_dsmla
from commands import report_of, run
from nvfp4_dsmla import layout, reference
from nvfp4_dsmla.cli import bench, inspection, plan, screen
from nvfp4_dsmla.cli.app import app
from nvfp4_dsmla.formats import CACHE_FORMATS
from nvfp4_dsmla.support import OPS

NOPE_DIM, HEAD_DIM = layout.NOPE_DIM, layout.HEAD_DIM


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def assert_plain(text: str) -> None:
    """No colours, no drawn lines, nothing past column 80."""
    assert "\x1b" not in text
    assert text.isascii(), [c for c in text if not c.isascii()]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


# ---- every screen ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of 3 blocks of 16 tokens, the last block never written, and its latents beside it."""
    folder = tmp_path_factory.mktemp("saved")
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(48, HEAD_DIM, generator=generator)
    latents[3, 5] = 5000.0  # past 6 * 448
    latents[4, 520] = -1000.0  # past 448
    latents[6, 530] = torch.nan
    latents[5, :16] = 1e-6  # below the smallest scale
    latents = latents.bfloat16()
    cache = nvfp4_dsmla.allocate_kv_cache(num_blocks=3, block_size=16)
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=latents[:, :NOPE_DIM],
        k_pe=latents[:, NOPE_DIM:],
        kv_cache=cache,
        slot_mapping=torch.arange(32),
    )
    torch.save(cache, folder / "cache.pt")
    np.save(folder / "cache.npy", cache.numpy())
    torch.save({"cache": cache, "latents": latents, "name": "both"}, folder / "both.pt")
    torch.save(latents, folder / "latents.pt")
    return folder / "cache.pt"


SCREENS = {
    "info": [],
    "plan": [],
    "verify": ["--tokens", "70"],
    "inspect": ["FILE"],
}


@pytest.mark.parametrize("command", SCREENS)
def test_a_screen_is_plain_where_there_is_no_terminal(command: str, cache_file: Path) -> None:
    arguments = [str(cache_file) if a == "FILE" else a for a in SCREENS[command]]
    text = run(command, *arguments)
    first_line_may_be_long = command == "inspect"  # it has the file's name
    assert_plain("\n".join(text.splitlines()[first_line_may_be_long:]))


@pytest.mark.parametrize("command", SCREENS)
def test_a_screen_is_drawn_on_a_terminal(
    command: str, cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        screen, "Console", lambda **kwargs: Console(**kwargs, force_terminal=True, width=80)
    )
    text = run(command, *(str(cache_file) if a == "FILE" else a for a in SCREENS[command]))
    assert "\x1b[1m" in text
    assert "──" in text


@pytest.mark.parametrize("command", SCREENS)
def test_json_says_as_much(command: str, cache_file: Path) -> None:
    arguments = [str(cache_file) if a == "FILE" else a for a in SCREENS[command]]
    assert report_of(command, *arguments)


def test_help_names_every_command() -> None:
    text = run("--help")
    for command in ("info", "verify", "plan", "inspect", "bench"):
        assert command in text


def test_it_is_a_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4_dsmla", "plan", "--model", "llama"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    wanted = "deepseek-v3.2, glm-5, glm-5.1, glm-5.2"
    assert done.stderr == f"nvfp4-dsmla: model: wanted one of {wanted}, got 'llama'\n"


def test_the_library_does_without_the_command_lines_dependencies() -> None:
    program = """
import sys
import nvfp4_dsmla
assert not {"typer", "rich", "matplotlib"} & set(sys.modules)
sys.modules["typer"] = None
from nvfp4_dsmla.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "nvfp4-dsmla: the command line needs typer, which is not installed: "
        "install the package with its extra, in a clone `pip install '.[cli]'`\n"
    )


# ---- info --------------------------------------------------------------------------------------


def test_info_has_the_facts() -> None:
    report = report_of("info")
    assert report["versions"]["nvfp4_dsmla"] == nvfp4_dsmla.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["libraries"] == [str(path) for path in nvfp4_dsmla.loaded_libraries()]
    assert report["formats"] == {f.name: f.bytes_per_token for f in CACHE_FORMATS.values()}
    assert list(report["ops"]) == list(OPS)
    assert report["devices"][0]["name"] == "cpu"
    for why_not in report["ops"].values():
        assert why_not["cpu"] is None
        assert len(why_not) == len(report["devices"])


def test_info_gives_a_reason_once_for_all_ops_that_share_it() -> None:
    report = report_of("info")
    text = run("info")
    for op in OPS:
        assert op in text
    for device in report["devices"]:
        reasons = {reason for op in OPS if (reason := report["ops"][op][device["name"]])}
        short = {reason.partition(": ")[2] for reason in reasons}
        for reason in short:
            assert " ".join(text.split()).count(reason) == 1


# ---- plan --------------------------------------------------------------------------------------


def test_plan_counts_whole_blocks() -> None:
    report = report_of("plan", "--memory", "60GiB", "--block-size", "64")
    row = report["formats"]["nvfp4_ds_mla"]
    a_token = 61 * (352 + 132)
    assert row["latent_bytes_a_token"] + row["indexer_bytes_a_token"] == a_token
    assert row["blocks"] == 60 * 2**30 // (64 * a_token)
    assert row["tokens"] == 64 * row["blocks"]


def test_plan_of_a_model_that_shares_indexers() -> None:
    """Layers 0 to 2, then every fourth from 6: 21 of 78."""
    full = [i for i in range(78) if max(i - 2, 0) % 4 == 0]
    assert plan.MODELS["glm-5.2"].indexer_layers == len(full)
    row = report_of("plan", "--model", "glm-5.2")["formats"]["fp8_ds_mla"]
    assert row["latent_bytes_a_token"] == 78 * 656
    assert row["indexer_bytes_a_token"] == 21 * 132


def test_plan_takes_other_numbers() -> None:
    report = report_of(
        *("plan", "--layers", "30", "--indexer-layers", "0", "--indexer-bytes", "7"),
        *("--ranks", "4", "--memory", "1MB", "--block-size", "1"),
    )
    assert report["formats"]["bfloat16"]["tokens"] == 4 * (1_000_000 // (30 * 1152))
    assert report["overridden"] == ["indexer_bytes", "indexer_layers", "layers"]


def test_plan_of_no_memory_has_no_tokens() -> None:
    assert {row["tokens"] for row in report_of("plan", "--memory", "0")["formats"].values()} == {0}
    assert "nvfp4_ds_mla" in run("plan", "--memory", "0")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("60GiB", 60 * 2**30),
        ("60 gib", 60 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("512k", 512_000),
        ("512Ki", 512 * 1024),
        ("1000000", 1_000_000),
        ("7B", 7),
    ],
)
def test_bytes_as_people_write_them(text: str, count: int) -> None:
    assert plan.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5.2G", "60 GiBs", "iB", "5i"])
def test_bytes_that_are_none(text: str) -> None:
    message = run("plan", f"--memory={text}", status=2)
    wanted = "memory: wanted bytes such as 60GiB or 1.5TB"
    assert message == f"nvfp4-dsmla: {wanted}, got {text!r}\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--layers", "0", "layers: wanted 1 or more, got 0"),
        ("--indexer-bytes", "-1", "indexer_bytes: wanted 0 or more, got -1"),
        ("--ranks", "0", "ranks: wanted 1 or more, got 0"),
        ("--block-size", "0", "block_size: wanted 1 or more, got 0"),
    ],
)
def test_plan_refuses(option: str, value: str, message: str) -> None:
    assert run("plan", option, value, status=2) == f"nvfp4-dsmla: {message}\n"


# ---- inspect -----------------------------------------------------------------------------------


def test_inspect_counts(cache_file: Path) -> None:
    report = report_of("inspect", str(cache_file))
    assert report["shape"] == [3, 16, 352]
    assert report["counts"] == {
        "records": 48,
        "empty": 16,
        "floor": 1,
        "ceiling": 1,
        "clipped": 1,
        "scale_nan": 0,
        "rope_max": 1,
        "rope_nan": 1,
    }
    assert report["blocks"] == 32 * 32
    assert sum(report["octaves"].values()) == 32 * 32
    assert report["octaves"]["-9"] == report["octaves"]["8"] == 1
    assert "error" not in report


def test_inspect_counts_fp8(cache_file: Path, tmp_path: Path) -> None:
    latents = torch.load(cache_file.with_name("latents.pt"))[None]
    latents[0, 1, :128] = 0
    latents[0, 2, 7] = torch.nan
    latents[0, 3, 5] = torch.inf
    cache = nvfp4_dsmla.convert_kv_cache(src=latents, src_format="bfloat16", dst_format="fp8")
    cache[0, 40:] = 0
    torch.save(cache, tmp_path / "fp8.pt")
    torch.save(latents, tmp_path / "latents.pt")
    against = ["--against", str(tmp_path / "latents.pt")]
    report = report_of("inspect", str(tmp_path / "fp8.pt"), *against)
    assert report["format"] == "fp8_ds_mla"
    assert report["counts"] == {
        "records": 48,
        "empty": 8,
        "floor": 1,
        "scale_nan": 1,
        "code_nan": 2,  # the NaN, and infinity over infinity
        "rope_nan": 1,
    }
    assert report["blocks"] == 40 * 4
    assert report["octaves"]["-126"] == 1
    assert sum(report["octaves"].values()) == 40 * 4 - 1  # infinity is in none
    assert report["finite_on_one_side"] == 127  # of the block under it
    assert report["error"]["rope"]["largest"] == 0
    text = run("inspect", str(tmp_path / "fp8.pt"))
    assert "   ...  " in text


def test_inspect_reads_files_of_both_kinds(cache_file: Path) -> None:
    report = report_of("inspect", str(cache_file))
    for other, key in (("cache.npy", []), ("both.pt", ["--key", "cache"])):
        again = report_of("inspect", str(cache_file.with_name(other)), *key)
        assert {**again, "file": report["file"]} == report


def test_inspect_measures_the_error(cache_file: Path) -> None:
    against = ["--against", str(cache_file.with_name("latents.pt"))]
    report = report_of("inspect", str(cache_file), *against)
    latents = torch.load(cache_file.with_name("latents.pt")).double()[:32]
    cache = torch.load(cache_file).view(-1, 352)[:32]
    error = reference.decode(cache, torch.float32).double() - latents
    nope = report["error"]["nope"]
    assert nope["largest"] == error[:, :NOPE_DIM].abs().max().item() == 5000 - 6 * 448 - 8
    rms = error[:, :NOPE_DIM].norm() / latents[:, :NOPE_DIM].norm()
    assert nope["relative_rms"] == pytest.approx(rms.item(), rel=1e-12)
    assert report["error"]["rope"]["largest"] == 1000 - 448
    assert report["finite_on_one_side"] == 0
    text = run("inspect", str(cache_file), *against)
    assert "Error against the latents given" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.pt"], "No such file or directory"),
        (["both.pt"], "both.pt: wanted one of the keys cache, latents, got no key"),
        (
            ["both.pt", "--key", "records"],
            "both.pt: wanted one of the keys cache, latents, got records",
        ),
        (
            ["latents.pt"],
            "latents.pt: wanted a cache of nvfp4_ds_mla or fp8_ds_mla, got bfloat16",
        ),
        (
            ["cache.pt", "--against", "cache.npy"],
            (
                "cache.npy: wanted floating point [..., 576] with a row for each of the 48 "
                "records, got torch.uint8 [3, 16, 352]"
            ),
        ),
    ],
)
def test_inspect_refuses(cache_file: Path, arguments: list[str], message: str) -> None:
    files = [str(cache_file.with_name(a)) if "." in a else a for a in arguments]
    assert message in run("inspect", *files, status=2)


@pytest.mark.parametrize("content", [b"", b"no cache", b"PK\x03\x04", b"\x80\x02K\x01."])
@pytest.mark.parametrize(
    ("suffix", "wanted"), [(".pt", "a zip file of torch.save"), (".npy", "an array of numpy.save")]
)
def test_inspect_refuses_other_files(
    tmp_path: Path, suffix: str, wanted: str, content: bytes
) -> None:
    file = tmp_path / f"some{suffix}"
    file.write_bytes(content)
    message = f"nvfp4-dsmla: some{suffix}: wanted {wanted}, got something else\n"
    assert run("inspect", str(file), status=2) == message


def test_inspect_refuses_a_folder_and_an_old_file(tmp_path: Path) -> None:
    assert "Is a directory" in run("inspect", str(tmp_path), status=2)
    old = tmp_path / "old.pt"
    torch.save(torch.zeros(1, 1, 352), old, _use_new_zipfile_serialization=False)
    assert "old.pt: wanted a zip file" in run("inspect", str(old), status=2)


def test_scales_by_octave() -> None:
    """Every e4m3 byte, by its value."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    counted = values.abs()[values.isfinite() & (values != 0)]
    exponents = counted.log2().floor().int().tolist()
    assert inspection.octaves(values) == {e: exponents.count(e) for e in set(exponents)}
    assert inspection.octaves(torch.tensor([0.0, torch.inf, torch.nan])) == {}
    assert inspection.octaves(torch.tensor([2.0**-126, 1.99, -1.0])) == {-126: 1, 0: 2}


def test_short_gaps_of_a_histogram_are_shown_and_long_ones_are_not() -> None:
    def filled(*exponents: int) -> list[int | None]:
        report = {"octaves": {str(e): 1 for e in exponents}}
        return [e for e, _ in inspection.histogram_of(report)]

    assert filled() == []
    assert filled(3, 4) == [3, 4]
    assert filled(-2, 2) == [-2, -1, 0, 1, 2]
    assert filled(-3, 2) == [-3, None, 2]


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_plot_is_a_png(command: str, cache_file: Path, tmp_path: Path) -> None:
    png = tmp_path / "plot.png"
    run(command, *([str(cache_file)] if command == "inspect" else []), "--plot", str(png))
    assert png.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(("name", "said"), [("no/plot.png", "No such file"), ("p.xyz", "xyz")])
def test_a_plot_that_cannot_be_is_refused(tmp_path: Path, name: str, said: str) -> None:
    assert said in run("plan", "--plot", str(tmp_path / name), status=2)


# ---- bench -------------------------------------------------------------------------------------


def test_bench_gives_its_arguments_to_the_benchmarks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "benchmarks").mkdir()
    program = "import sys\nsys.exit(0 if sys.argv[1:] == ['cache', '--quick', '--help'] else 7)\n"
    (tmp_path / "benchmarks" / "__main__.py").write_text(program)
    monkeypatch.setattr(bench, "checkout", lambda: tmp_path)
    run("bench", "cache", "--quick", "--help")
    assert CliRunner().invoke(app, ["bench", "host"]).exit_code == 7


def test_bench_finds_the_checkout_of_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvfp4_dsmla, "__file__", str(tmp_path / "lib" / "a" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert bench.checkout() is None
    assert "bench: wanted a checkout of the project" in run("bench", status=2)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").touch()
    assert bench.checkout() == tmp_path


# ---- numbers as text ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (60 * 2**30, "60 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes_text(count: int, text: str) -> None:
    assert screen.bytes_text(count) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 10**9, "0.00%"),
        (1, 10**9, "<0.01%"),
        (1, 3, "33.33%"),
        (10**9 - 1, 10**9, ">99.99%"),
        (5, 5, "100.00%"),
        (0, 0, ""),
    ],
)
def test_share_text(part: int, whole: int, text: str) -> None:
    assert screen.share_text(part, whole) == text


def test_a_bar_of_something_is_not_empty() -> None:
    plain = screen.Screen(as_json=False)
    shares = (0, 1e-9, 0.5, 1, 2)
    assert [len(plain.bar(share, width=20)) for share in shares] == [0, 1, 10, 20, 20]
