"""The operations of the golden vectors, each in terms of the public functions: JSON values in, JSON values out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from miles_weightsync import bucket, delta, frame, gather, names, plan, units, versions
from miles_weightsync.digest import digest_bytes
from miles_weightsync.golden_state import lock_events, publish_update, receiver_events
from miles_weightsync.manifest import Manifest, diff_manifests, manifest_of
from miles_weightsync.tensors import RawTensor, Spec

Params = Mapping[str, Any]


def _plan_buckets(params: Params, items: Any) -> Any:
    options = {key: params[key] for key in ("ep_size", "order") if key in params}
    planned = [bucket.BucketItem(item["name"], item["nbytes"], item.get("unit")) for item in items]
    return bucket.plan_buckets(planned, params["capacity"], **options)


def _form_units(params: Params, given: Any) -> Any:
    companions = [units.Companion(c["owner"], tuple(c["attach"])) for c in params.get("companions", ())]
    return units.form_units(given, params.get("rules", ()), companions)


def _layout(params: Params, sizes: Any) -> Any:
    offsets, total = bucket.layout(sizes, params["align"])
    return {"offsets": offsets, "total": total}


def _layout_packed(params: Params, tensors: Any) -> Any:
    packed = bucket.layout_packed([(t["dtype"], t["nbytes"]) for t in tensors], sort=params["sort"])
    return {"order": packed.order, "offsets": packed.offsets, "total": packed.total}


def _merge_tp(params: Params, given: Any) -> Any:
    options = {key: params[key] for key in ("stride", "duplicated") if key in params}
    shards = [np.array(shard) for shard in given["shards"]]
    return gather.merge_tp(shards, params["partition_dim"], **options).tolist()


def _split_qkv(params: Params, given: Any) -> Any:
    parts = gather.split_qkv(np.array(given["qkv"]), **params)
    return {key: part.tolist() for key, part in zip("qkv", parts, strict=True)}


def _split_gate_up(params: Params, given: Any) -> Any:
    gate, up = gather.split_gate_up(np.array(given))
    return {"gate": gate.tolist(), "up": up.tolist()}


def _pp_layers(params: Params, given: Any) -> Any:
    place = {"pp_rank": given["pp_rank"], "vp_stage": given["vp_stage"]}
    return gather.global_layers(given["local_layers"], **params, **place)


def _check_names(params: Params, given: Any) -> Any:
    names.check_names(given["expected"], given["sent"])
    return "ok"


def _slice_table(params: Params, given: Any) -> Any:
    parameters = [
        plan.EngineParameter(
            p["param"],
            p["dtype"],
            tuple(plan.Part(q["hf"], tuple(q["shape"]), q["dim"], q.get("shards")) for q in p["parts"]),
            p.get("experts"),
        )
        for p in given
    ]
    return plan.slices_to_json(plan.slice_table(parameters, ranks=params["ranks"], ep=params.get("ep", 1)))


def _broadcast_groups(params: Params, given: Any) -> Any:
    return [
        {"name": group.name, "world_size": group.world_size, "rank_offsets": group.rank_offsets}
        for group in plan.broadcast_groups(params["pp"], given["engine_gpus"])
    ]


def _raw(tensor: Any) -> tuple[str, RawTensor]:
    data = memoryview(bytes.fromhex(tensor["hex"]))
    return tensor["name"], RawTensor(tensor["dtype"], tuple(tensor["shape"]), data)


def _manifest_of(tensors: Any) -> Manifest:
    return manifest_of(0, (_raw(tensor) for tensor in tensors))


def _manifest(params: Params, tensors: Any) -> Any:
    manifest = _manifest_of(tensors)
    return {"tensors": manifest.digests(), "manifest_sha256": manifest.digest}


def _diff_manifest(params: Params, given: Any) -> Any:
    diff = diff_manifests(_manifest_of(given["base"]), _manifest_of(given["new"]))
    return {"missing": diff.missing, "extra": diff.extra, "meta": diff.meta, "bytes": diff.bytes}


def _encode(params: Params, given: Any) -> Any:
    new = bytes.fromhex(given["new_hex"])
    stream = delta.encode_delta(bytes.fromhex(given["old_hex"]), new, params["encoding"])
    return {"delta_hex": stream.hex(), "digest": digest_bytes(new, params.get("checksum", "xxh3-128"))}


def _apply(params: Params, given: Any) -> Any:
    data, stream = bytes.fromhex(given["old_hex"]), bytes.fromhex(given["delta_hex"])
    for _ in range(params.get("times", 1) - 1):
        data = delta.patch(data, stream, params["encoding"])
    checksum = params.get("checksum", "xxh3-128")
    return {"new_hex": delta.apply_delta(data, stream, params["encoding"], given["digest"], checksum).hex()}


def _encodable(params: Params, given: Any) -> Any:
    delta.check_encodable(params["encoding"], given["nbytes"], given["changed"])
    return "ok"


def _changed(params: Params, given: Any) -> Any:
    old, new = ({name: bytes.fromhex(text) for name, text in given[key].items()} for key in ("old", "new"))
    return delta.changed_names(old, new)


def _apply_chain(params: Params, given: Any) -> Any:
    steps = [
        delta.Delta(d["version"], d["base_version"], d["encoding"], bytes.fromhex(d["delta_hex"]), d["digest"])
        for d in given["deltas"]
    ]
    data, applied = delta.apply_chain(bytes.fromhex(given["base_hex"]), given["applied"], steps)
    return {"applied": applied, "hex": data.hex()}


def _published(given: Any) -> list[delta.PublishedVersion]:
    return [
        delta.PublishedVersion(v["version"], v["kind"], v.get("base_version"), v["committed"])
        for v in given["versions"]
    ]


def _plan_pull(params: Params, given: Any) -> Any:
    return delta.plan_pull(given["applied"], given["target"], _published(given))


def _validate_index(params: Params, given: Any) -> Any:
    entries = [delta.DirectoryEntry(entry["name"], entry["kind"]) for entry in given["entries"]]
    index = delta.validate_index(given["dir"], given["index_text"], given["commit_text"], entries, given["applied"])
    return {"kind": index.kind, "version": index.version, "base_version": index.base_version, "files": index.files}


def _check_base(params: Params, given: Any) -> Any:
    base, new = ([Spec(t["name"], t["dtype"], tuple(t["shape"])) for t in given[key]] for key in ("base", "new"))
    delta.check_base(base, new)
    return "ok"


def _build(params: Params, given: Any) -> Any:
    tensors = [_raw(tensor) for tensor in given["tensors"]]
    table, nbytes = frame.make_table(tensors)
    fields = {key: given[key] for key in ("session", "version", "base_version", "bucket", "phase", "selector")}
    built = frame.build_frame(frame.BucketHeader(**fields, tensors=table, payload_nbytes=nbytes), tensors)
    parsed = frame.parse_frame(built)
    trailer = built[-frame.TRAILER_NBYTES :].hex()
    return {"header": parsed.header.to_json(), "payload_hex": parsed.payload.hex(), "trailer_hex": trailer}


def _parse(params: Params, given: Any) -> Any:
    parsed = frame.parse_frame(bytes.fromhex(given["hex"]))
    tensors = {name: tensor.data.hex() for name, tensor in parsed.tensors().items()}
    return {"header": parsed.header.to_json(), "payload_hex": parsed.payload.hex(), "tensors": tensors}


def _serve(params: Params, given: Any) -> Any:
    decision = versions.decide([versions.Replica(**replica) for replica in given["replicas"]], given["request"])
    answer: dict[str, Any] = {"decision": decision.decision, "status": decision.status}
    if decision.decision == "serve":
        return answer | {"replicas": decision.replicas}
    return answer if decision.decision == "bad_request" else answer | {"retryable": decision.retryable}


def _spans(params: Params, given: Any) -> Any:
    spans = versions.version_spans(given)
    return {"first": spans.first, "last": spans.last, "spans": spans.spans}


OPERATIONS: Mapping[tuple[str, str], Callable[[Params, Any], Any]] = {
    ("buckets", "plan_buckets"): _plan_buckets,
    ("buckets", "canonical_order"): lambda params, given: names.canonical_order(given),
    ("buckets", "form_units"): _form_units,
    ("buckets", "layout"): _layout,
    ("buckets", "layout_packed"): _layout_packed,
    ("gather", "merge_tp"): _merge_tp,
    ("gather", "shard_group"): lambda params, given: [gather.shard_group(name) for name in given],
    ("gather", "gather_ep"): lambda params, given: gather.gather_ep(given["ranks"], **params),
    ("gather", "split_qkv"): _split_qkv,
    ("gather", "split_gate_up"): _split_gate_up,
    ("gather", "pp_layers"): _pp_layers,
    ("gather", "cut_vocab"): lambda params, given: gather.cut_vocab(np.array(given), **params).tolist(),
    ("gather", "tied_embeddings"): lambda params, given: gather.embeddings_to_send(**params),
    ("gather", "check_names"): _check_names,
    ("gather", "pp_owner"): lambda params, given: gather.stage_owners(given["stages"]),
    ("p2p_plan", "plan_p2p"): lambda params, given: plan.plan_p2p(**params),
    ("p2p_plan", "slice_table"): _slice_table,
    ("p2p_plan", "broadcast_groups"): _broadcast_groups,
    ("manifest", "manifest"): _manifest,
    ("manifest", "digest"): lambda params, given: digest_bytes(bytes.fromhex(given), params["format"]),
    ("manifest", "diff_manifest"): _diff_manifest,
    ("delta", "encode"): _encode,
    ("delta", "apply"): _apply,
    ("delta", "encodable"): _encodable,
    ("delta", "changed"): _changed,
    ("delta", "apply_chain"): _apply_chain,
    ("delta", "plan_pull"): _plan_pull,
    ("delta", "gc"): lambda params, given: delta.deletable_versions(given["acknowledged"], _published(given)),
    ("delta", "validate_index"): _validate_index,
    ("delta", "check_base"): _check_base,
    ("delta", "decompress"): lambda params, given: delta.decompress(bytes.fromhex(given), params["cap"]).hex(),
    ("frame", "build"): _build,
    ("frame", "parse"): _parse,
    ("state", "receiver"): receiver_events,
    ("state", "lock"): lock_events,
    ("state", "publish"): publish_update,
    ("versions", "serve"): _serve,
    ("versions", "spans"): _spans,
}
"""(family, op) → the operation. It raises WeightSyncError where the vector names an error class."""
