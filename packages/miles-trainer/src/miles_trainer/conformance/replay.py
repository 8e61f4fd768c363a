"""The replay family: each `op` through the public functions of `miles_trainer.replay`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miles_trainer.errors import NotBuiltError, ReplayError
from miles_trainer.replay.layout import ReplayLayout, shard_rows, stage_layers
from miles_trainer.replay.records import decode_routed, expand_layers, join_records, validate_routed, wire_dtype

Case = Mapping[str, Any]


def compute(case: Case) -> tuple[str, Any]:
    """("expect", value) or ("expect_error", code)."""
    if case["op"] not in OPERATIONS:
        raise NotBuiltError(f"not built: op {case['op']}")
    try:
        return "expect", OPERATIONS[case["op"]](case["params"], case["input"])
    except ReplayError as error:
        return "expect_error", error.code


def _decode(params: Case, given: Case) -> Any:
    return decode_routed(given["b64"], num_layers=params["num_layers"], rows=params["rows"]).tolist()


def _dtype(params: Case, given: Case) -> Any:
    return wire_dtype(params["num_experts"], has_padding=given.get("has_padding", False))


def _validate(params: Case, given: Case) -> Any:
    validate_routed(given["routed"], tokens=given["tokens"], **_dimensions(params))
    return "ok"


def _dimensions(params: Case) -> dict[str, int]:
    return {name: params[name] for name in ("num_experts", "num_layers", "top_k")}


def _slice(params: Case, given: Case) -> Any:
    samples = [validate_routed(s["routed"], tokens=s["tokens"], **_dimensions(params)) for s in given["samples"]]
    layout = ReplayLayout(params["cp_size"], params["cp_layout"], params["tp_size"], params["pad_multiple"])
    shards = shard_rows(samples, layout, num_experts=params["num_experts"])
    ranks = [
        {"cp": cp, "tp": tp, "streams": {str(layer): rows[:, layer].tolist() for layer in params["layers"]}}
        for cp, parts in enumerate(shards.streams)
        for tp, rows in enumerate(parts)
    ]
    return {"sample_spans": [[list(span) for span in spans] for spans in shards.spans], "ranks": ranks}


def _stage(params: Case, given: Case) -> Any:
    parallel = {"pp": params.get("pp", 1), "vp": params.get("vp", 1), **given}
    return stage_layers(params["num_layers"], params["moe_layer_freq"], **parallel)


def _expand(params: Case, given: Any) -> Any:
    return expand_layers(given, num_layers=params["num_layers"], moe_layers=params["moe_layers"]).tolist()


def _join(params: Case, given: Case) -> Any:
    return join_records(given["records"], tokens=given["tokens"]).tolist()


OPERATIONS: Mapping[str, Callable[[Case, Any], Any]] = {
    "decode_routed": _decode,
    "wire_dtype": _dtype,
    "validate_routed": _validate,
    "replay_slice": _slice,
    "stage_layers": _stage,
    "expand_layers": _expand,
    "join_records": _join,
}
