"""The command `verify`: what it finds, and what it says of devices that it cannot serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nvfp4_dsmla
from commands import report_of, run
from nvfp4_dsmla import ops, reference, reference_formats
from nvfp4_dsmla.cli import verify
from nvfp4_dsmla.formats import CACHE_FORMATS


def test_verify_passes(device: torch.device) -> None:
    report = report_of("verify", "--tokens", "200", "--device", str(device))
    assert report["passed"]
    assert report["failed"] == 0
    assert {check["device"] for check in report["checks"]} == {str(device)}
    assert {check["tokens"] for check in report["checks"]} == {86, 104, 200}
    assert {check["format"] for check in report["checks"]} == set(CACHE_FORMATS)
    assert all(check["differences"] == 0 for check in report["checks"])


def test_verify_names_the_byte_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = reference.NVFP4.encode

    def other(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        records = real(kv_c, k_pe)
        records[7, 300] += 1
        return records

    codecs = {**reference_formats.CODECS, "nvfp4_ds_mla": reference.NVFP4._replace(encode=other)}
    monkeypatch.setattr(reference_formats, "CODECS", codecs)
    text = run("verify", "--tokens", "64", "--device", "cpu", status=1)
    assert "1 wrong" in text
    assert ", byte 300: got " in text
    # Three random writes, and two conversions into the format.
    assert "5 of 32 checks FAILED" in text
    assert report_of("verify", "--tokens", "64", "--device", "cpu", status=1)["failed"] == 5


@pytest.mark.parametrize("poison", [0.5, torch.nan])
def test_verify_sees_attention_that_is_off(monkeypatch: pytest.MonkeyPatch, poison: float) -> None:
    real = nvfp4_dsmla.sparse_mla_decode

    def other(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = real(**arguments)
        return out, lse + poison

    monkeypatch.setattr(ops, "sparse_mla_decode", other)
    report = report_of("verify", "--tokens", "64", "--device", "cpu", status=1)
    assert report["failed"] == 2  # to all tokens, and merged
    assert report["checks"][-1]["first"].endswith(", want 0.005 at most")


def test_verify_sees_a_merge_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(**arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return arguments["out_a"], arguments["lse_a"]

    monkeypatch.setattr(ops, "merge_attention_states", other)
    report = report_of("verify", "--tokens", "64", "--device", "cpu", status=1)
    assert [check["check"] for check in report["checks"] if check["differences"] > 0] == [
        "attention merged of two, within 0.5%"
    ]


def test_verify_sees_a_fused_write_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla"
    real = getattr(ops, name)

    def other(**arguments: Any) -> None:
        real(**{**arguments, "is_neox": True})

    monkeypatch.setattr(ops, name, other)
    report = report_of("verify", "--tokens", "64", "--device", "cpu", status=1)
    assert report["failed"] == 3
    failed = [check for check in report["checks"] if check["differences"] > 0]
    assert all(check["check"].endswith(" fused write") for check in failed)


def test_verify_sees_a_value_that_differs() -> None:
    got, want = torch.tensor([[1.0, torch.nan]]), torch.tensor([[1.0, torch.nan]])
    assert verify._first_difference(got, want, "token", "dim") == (0, "")
    want[0, 0] = -0.0
    got[0, 0] = 0.0
    assert verify._first_difference(got, want, "token", "dim") == (
        1,
        "token 0, dim 0: got 0.0, want -0.0",
    )


def test_golden_records_are_installed() -> None:
    installed = {path.name: path.read_bytes() for path in verify.GOLDEN.glob("*.npz")}
    here = Path(__file__).parent / "golden"
    assert installed == {path.name: path.read_bytes() for path in here.glob("*.npz")}


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:99", "--device: cuda:99 is not one of the"),
        ("gpu", "--device: wanted cpu, cuda or cuda:1, got 'gpu'"),
        ("meta", "wanted a device of type cpu or cuda, got meta"),
    ],
)
def test_verify_refuses_a_device(device: str, message: str) -> None:
    assert message in run("verify", "--device", device, status=2)


def test_verify_leaves_out_attention_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(*, op: str, **_: object) -> str | None:
        return "not here" if op == "sparse_mla_decode" else None

    monkeypatch.setattr(verify, "supports_combination", supports)
    report = report_of("verify", "--tokens", "8", "--device", "cpu")
    assert report["passed"]
    assert not any("attention" in check["check"] for check in report["checks"])
