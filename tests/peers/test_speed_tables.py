"""How `make bench` measures and what its tables say; the run itself is `make bench`, and short, `make bench-short`."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import refops
from peers import registry, subjects, torch_compiled
from peers.subjects import MXFP8, SUBJECTS, TIMED

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import compare  # noqa: E402
import tables  # noqa: E402

HOST, EAGER, COMPILED, AO = (
    "cuda_kernels.host",
    "torch formulas, eager",
    "torch formulas, torch.compile",
    "torchao (one level)",
)


def row(operation, competitor, ms, share=None, threads=1, size=(4096, 4096)):
    made = {"operation": operation, "competitor": competitor, "size": list(size), "threads": threads}
    made |= {"traffic_bytes": 10**6, "best_ms": ms}
    return made if share is None else {**made, "equal_shares": {"rowwise codes": share}}


def document():
    """Two operations: host ahead in one, behind in the other, where torchao is faster still with other bits."""
    rows = []
    for threads in (1, 2):
        share = 1.0 if threads == 1 else None
        rows += [
            row("MXFP8 rowwise", "refops", 40.0, share, threads),
            row("MXFP8 rowwise", HOST, 5.0, share, threads),
            row("MXFP8 rowwise", EAGER, 90.0, share, threads),
            row("MXFP8 rowwise", COMPILED, 10.0, share, threads),
            row("MXFP8 rowwise", "memcpy", 2.0, None, threads),
            row("NVFP4 1x16", "refops", 50.0, share, threads),
            row("NVFP4 1x16", HOST, 9.0, share, threads),
            row("NVFP4 1x16", EAGER, 8.0, share, threads),
            row("NVFP4 1x16", AO, 4.0, share and 0.9, threads),
            row("NVFP4 1x16", "memcpy", 1.0, None, threads),
        ]
    compare.mark_equal(rows)
    compare.ratios(rows)
    machine = {"cpu": "A (R) Processor", "cpus": 2, "memory_gib": 8.0}
    peers = [{"name": "microxcaling", "versions": {}, "absent": "No module named 'mx'"}]
    method = {"most_rounds": 25}
    return {"date": "2026-01-01", "python": "3.11", "machine": machine, "method": method, "peers": peers, "rows": rows}


# --- measuring --------------------------------------------------------------------------------------------------------


def test_rounds_alternate_and_a_slow_competitor_has_fewer(monkeypatch):
    monkeypatch.setattr(compare, "ROUNDS", 4)
    order = []
    runs = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "slow": lambda: time.sleep(0.05)}
    samples = compare.rounds_of(runs, seconds=0.2)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"] or order[:4] == ["a", "b", "b", "a"]
    assert len(samples["a"]) == len(samples["b"]) == 4 > len(samples["slow"]) >= 1
    assert min(wall for wall, _ in samples["slow"]) >= 0.05


def test_everybody_has_one_round_even_without_time():
    samples = compare.rounds_of({"a": lambda: None, "slow": lambda: time.sleep(0.02)}, seconds=0.0)
    assert all(samples.values())


def test_equal_shares_are_of_each_array():
    subject = SUBJECTS["MXFP8 E4M3, TE's rule"]
    x = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    q = refops.quantize(x, MXFP8)
    arrays = subject.arrays(refops, x)
    assert compare.equal_shares(subject, q, arrays) == {"rowwise codes": 1.0, "rowwise scales": 1.0}
    codes = arrays["rowwise codes"].copy()
    codes[0, :8] ^= 1
    found = compare.equal_shares(subject, q, {**arrays, "rowwise codes": codes})
    assert found == {"rowwise codes": 1 - 8 / codes.size, "rowwise scales": 1.0}
    assert compare.equal_shares(subject, q, {"values": refops.dequantize(q)}) == {"values": 1.0}
    assert compare.equal_shares(subject, q, {"rowwise codes": codes[:2]}) is None


def test_a_small_wrong_array_is_not_hidden_by_a_large_right_one():
    """A dbias of zeros is one element in 2000."""
    operation = "dswiglu -> MXFP8, dbias"
    subject = SUBJECTS[operation]
    tensors = compare.make_inputs(1024, 64)
    right = subject.call(refops, *(tensors[name] for name in subject.inputs))
    arrays = subjects.read(right)
    arrays["dbias"] = np.zeros_like(arrays["dbias"])
    rows = [{**row(operation, EAGER, 1.0), "equal_shares": compare.equal_shares(subject, right, arrays)}]
    compare.mark_equal(rows)
    assert rows[0]["equal"] is False
    assert compare.failures({"rows": rows}) == [f"{EAGER}, {operation}, [4096, 4096]: 0.0000% of dbias equal"]


def test_what_no_transform_touches_is_exact():
    operation = "NVFP4 both directions, RHT"
    for name, equal in (("rowwise scales", False), ("columnwise scales", True)):
        rows = [{**row(operation, EAGER, 1.0), "equal_shares": {name: 0.9999}}]
        compare.mark_equal(rows)
        assert rows[0]["equal"] is equal


def test_results_that_cannot_be_compared_fail():
    rows = [{**row("gelu", EAGER, 1.0), "equal_shares": None}]
    compare.mark_equal(rows)
    assert compare.failures({"rows": rows}) == [
        f"{EAGER}, gelu, [4096, 4096]: other arrays or shapes than those of refops"
    ]


def test_stand_ins_only_where_a_peer_has_nothing_closer():
    def offer(subject):
        return registry.Offer(subject, lambda x: x, lambda y: {}, lambda x: x)

    tensors = {"x": np.ones((128, 128), np.float32)}
    both = registry.Peer("both", {}, (offer("FP8 1x128 E4M3, any scale"), offer("FP8 1x128 E4M3")))
    other = registry.Peer("other", {}, (offer("FP8 1x128 E4M3, any scale"),))
    found = compare.competitors("FP8 1x128", tensors, [both, other])
    assert list(found) == ["refops", HOST, "both", "other (any scale)"]
    assert found["other (any scale)"][2] == "FP8 1x128 E4M3, any scale"


def test_every_timed_operation_exists_and_runs():
    tensors = compare.make_inputs(128, 256)
    for operation in TIMED:
        for _, (run, read, _) in compare.competitors(operation, tensors, []).items():
            assert read(run())


def test_copies_copy_all_bytes_with_any_number_of_threads():
    for threads in (1, 2, 3):
        source, target = np.arange(1001, dtype=np.uint16), np.zeros(1001, np.uint16)
        compare.copier(source, target, threads)()
        assert (source == target).all()
        compare.copies(1001, threads)["memcpy"]()


def test_the_fastest_of_several_ways():
    def slow():
        time.sleep(0.01)

    def quick():
        time.sleep(0.001)

    assert compare.fastest([slow, quick]) is compare.fastest([quick, slow]) is quick


def test_torch_compile_keeps_the_faster_version_for_each_shape():
    small, large = np.ones(2), np.ones(9)
    versions = {name: lambda x, slow=slow: time.sleep(0.005 * (len(x) == slow)) for name, slow in (("a", 2), ("b", 9))}
    function = torch_compiled.Faster(versions)
    for x in (small, large, small):
        function(x)
    assert function.chosen == {((2,),): "b", ((9,),): "a"}


def test_a_confined_process_has_one_thread_everywhere():
    environment = compare.confined(1)
    assert environment["OMP_NUM_THREADS"] == environment["NUMBA_NUM_THREADS"] == "1"
    assert "multi_thread_eigen=false" in environment["XLA_FLAGS"]


def test_peak_memory_is_that_of_the_call():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's /proc")
    kept = np.ones(8 << 20, np.uint8)
    assert 24 << 20 <= compare.peak_of(lambda: np.ones(32 << 20, np.uint8)[:1].copy()) <= 64 << 20
    assert compare.peak_of(lambda: kept[:16].copy()) < 8 << 20


# --- what comes of it -------------------------------------------------------------------------------------------------


def test_ratios_name_the_best_peer_of_all_and_of_those_with_equal_bits():
    host = {r["operation"]: r for r in document()["rows"] if r["competitor"] == HOST and r["threads"] == 2}
    assert host["MXFP8 rowwise"]["best_peer"] == host["MXFP8 rowwise"]["best_equal_peer"] == COMPILED
    assert (host["MXFP8 rowwise"]["to_best_equal_peer"], host["MXFP8 rowwise"]["to_memcpy"]) == (0.5, 2.5)
    assert (host["NVFP4 1x16"]["best_peer"], host["NVFP4 1x16"]["best_equal_peer"]) == (AO, EAGER)


def test_wrong_bits_of_ours_or_of_a_formula_fail():
    assert compare.failures(document()) == []
    rows = [row("MXFP8 rowwise", HOST, 1.0, 0.99), row("swiglu", EAGER, 1.0, 0.9995), row("gelu", EAGER, 1.0, 0.99)]
    compare.mark_equal(rows)
    rows.append({**row("gelu", COMPILED, 1.0), "failed": "InternalError: no"})
    assert len(compare.failures({"rows": rows})) == 3


def test_short_table_says_where_host_is_behind():
    text = tables.short(document())
    assert "| MXFP8 rowwise | 2.00 | 40.0 | 5.00 | 2.50x | 10.0 (torch.compile) | 2.0x |" in text
    assert "8.00 (torch eager) | **0.89x, behind** |" in text
    assert "host is behind, 1 thread: NVFP4 1x16." in text
    assert "other bits, 2 threads: NVFP4 1x16 (torchao (one level), 4.00 ms)." in text


def test_tables_without_an_operation_at_one_number_of_threads_and_without_host():
    made = document()
    made["rows"] = [
        r for r in made["rows"] if (r["threads"], r["operation"]) != (1, "MXFP8 rowwise") and r["competitor"] != HOST
    ]
    made["rows"].append(row("FP8 1x128", "memcpy", 3.0))
    compare.ratios(made["rows"])
    text = tables.short(made)
    assert "| MXFP8 rowwise | - | - | - | - | - | - | 2.00 | - | - | - | - |" in text
    assert "| FP8 1x128 | 3.00 |" in text
    assert tables.full(made)
    assert tables.plain(made)


def test_tables_of_nothing_are_an_error():
    empty = {**document(), "rows": []}
    for make in (tables.short, tables.full, tables.plain):
        with pytest.raises(ValueError, match="document must have rows; got none"):
            make(empty)
    with pytest.raises(ValueError, match="size must be one that was measured"):
        tables.short(document(), (64, 64))


def test_the_plot_has_every_peer_that_is_the_fastest():
    made = document()
    made["rows"].append(row("NVFP4 1x16", "newcomer (one level)", 0.5, 0.5))
    compare.mark_equal(made["rows"])
    compare.ratios(made["rows"])
    found = tables.plotted(tables.at_size(made, tables.MAIN_SIZE))
    assert {"newcomer", "torchao", HOST} <= set(found)
    assert len({marker for _, marker, _ in found.values()}) == len(found)


def test_results_are_the_newest_or_those_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match="must hold a cpu_"):
        tables.results()
    for name, date in (("a", "2026-02-01"), ("b", "2026-01-01")):
        (tmp_path / f"cpu_{name}.json").write_text(json.dumps({**document(), "date": date}))
    assert tables.results()["date"] == "2026-02-01"
    assert tables.results(tmp_path / "cpu_b.json")["date"] == "2026-01-01"


def test_full_table_has_every_peer_and_marks_other_bits():
    text = tables.full(document())
    assert "4.00~" in text
    assert "Absent: microxcaling (No module named 'mx')." in text
    assert text.count("4096 x 4096, ") == 2


def test_plain_table():
    text = tables.plain(document())
    assert "0.89x, behind" in text
    assert "*" not in text


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plot(tmp_path, suffix):
    path = tmp_path / "made" / f"speed{suffix}"
    tables.plot(document(), path)
    assert path.stat().st_size > 2000
    if suffix == ".svg":
        assert "MXFP8 rowwise" in path.read_text()


def test_slug():
    assert compare.slug("AMD EPYC(TM) 9B14, 96-Core") == "amd_epyc_tm_9b14_96_core"


@pytest.mark.parametrize("path", sorted(compare.RESULTS.glob("cpu_*.json")), ids=lambda path: path.stem)
def test_committed_results_are_of_the_present_operations(path):
    """`make bench` writes them anew."""
    results = json.loads(path.read_text())
    assert path.stem == f"cpu_{compare.slug(results['machine']['cpu'])}"
    assert {r["operation"] for r in results["rows"]} == set(TIMED)
    assert {tuple(r["size"]) for r in results["rows"]} == set(compare.SIZES)
    assert {r["threads"] for r in results["rows"]} == {1, 2}
    assert compare.failures(results) == []
    # Peers that joined for their bits alone have no times yet.
    assert {peer["name"] for peer in results["peers"]} <= {peer.name for peer in registry.load()}
    assert tables.short(results)
    assert tables.full(results)
