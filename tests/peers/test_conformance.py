"""The adapters of the peers that are installed, their accounts of what differs, and the committed table.

Tensors are few here; `make conformance` has the whole set.
"""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

import refops
from peers import conformance, formulas, inputs, registry
from peers.subjects import MXFP8, NVFP4, SUBJECTS, TIMED, comparable, read
from tiers import sampled

pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers' own making

#: Never absent.
ALWAYS = ("torch_casts", "torch_eager", "ml_dtypes_casts")
OWN = [m for m in registry.MODULES if not m.endswith(("formulas", "eager", "compiled"))]


def present(module):
    """The peer of a module, or skip with the reason."""
    (peer,) = registry.load(module)
    if peer.absent:
        assert module not in ALWAYS, peer.absent
        pytest.skip(f"{peer.name}: {peer.absent}")
    return peer


def few(peer, offer):
    """The row of an offer on few tensors."""
    return conformance.compare(peer, offer, real=False, dtypes=offer.dtypes[:1])


# --- every difference is accounted for -------------------------------------------------------------------------------


@sampled("third", range(3), 3, in_all=1)
@pytest.mark.parametrize("module", OWN)
def test_every_difference_is_explained(module, third):
    """Of every third offer: offers that follow one another differ in the rule of the scale alone."""
    peer = present(module)
    offers = [offer for offer in peer.offers if conformance.is_compared(peer, offer)][third::3]
    if not offers:
        pytest.skip(f"{peer.name} offers less")
    for offer in offers:
        row = few(peer, offer)
        assert conformance.unexplained(row) == 0, (offer.subject, offer.variant, row["examples"])
        assert row["ordinary"]["elements"] > 0


def test_own_casts_agree_where_they_should():
    """ml_dtypes' non-saturating casts and torch's E5M2 have no divergence to name: all bits equal."""
    (peer,) = registry.load("ml_dtypes_casts")
    for fmt in ("E4M3", "E5M2"):
        row = conformance.compare(peer, peer.offer(f"{fmt} cast, not saturating"))
        for kind in conformance.KINDS:
            assert row[kind]["agree"] == row[kind]["elements"] > 0


# --- the comparison notices ------------------------------------------------------------------------------------------


def with_fault(offer, fault):
    """The offer with its arrays changed by `fault`."""
    return dataclasses.replace(offer, arrays=lambda result: fault(offer.arrays(result)))


def a_flipped_bit(arrays):
    name = next(iter(arrays))
    array = arrays[name].copy()
    array.reshape(-1)[-1] ^= 1
    return {**arrays, name: array}


def swapped_elements(arrays):
    name = next(iter(arrays))
    return {**arrays, name: np.roll(arrays[name], 1)}


@pytest.mark.parametrize("fault", [a_flipped_bit, swapped_elements])
@pytest.mark.parametrize("module", ["torch_casts", "ml_dtypes_casts", "jnp_casts"])
def test_a_wrong_adapter_is_noticed(module, fault):
    peer = present(module)
    for subject in ("E4M3 cast, saturating", "E5M2 cast, saturating"):
        row = few(peer, with_fault(peer.offer(subject), fault))
        assert conformance.unexplained(row) > 0
        assert row["examples"]
        assert "UNEXPLAINED" in conformance.difference(row)


def test_a_wrong_account_is_noticed():
    """Where the account predicts what the peer does not do, though refops and the peer agree there."""
    (peer,) = registry.load("ml_dtypes_casts")
    offer = peer.offer("E4M3 cast, not saturating")
    wrong = registry.Divergence("made up", "Saturates.", lambda x: {"codes": refops.encode(x, refops.E4M3)})
    row = few(peer, dataclasses.replace(offer, divergences=(wrong,)))
    assert row["ordinary"]["agree"] == row["ordinary"]["elements"]
    assert conformance.unexplained(row) > 0


def test_a_wrong_shape_is_an_error():
    (peer,) = registry.load("ml_dtypes_casts")
    offer = with_fault(peer.offer("E4M3 cast, saturating"), lambda arrays: {"codes": arrays["codes"][:-1]})
    with pytest.raises(ValueError, match="codes of the peer must have shape"):
        few(peer, offer)


def casts_with(fault, refuses):
    """The offer of a cast that calls `fault` on its input first, and says that it refuses so much."""
    (peer,) = registry.load("ml_dtypes_casts")
    offer = peer.offer("E5M2 cast, not saturating")

    def run(x):
        fault(x)
        return offer.run(x)

    return peer, dataclasses.replace(offer, run=run, refuses=refuses)


def no_nan(x):
    if np.isnan(x.astype(np.float32)).any():
        raise ValueError("no NaN here")


def test_a_refusal_says_what_is_refused():
    row = few(*casts_with(no_nan, {"NaN": ValueError}))
    assert row["refuses"] == {"NaN": "ValueError: no NaN here"}
    assert row["special"]["elements"] == row["special"]["agree"] == 2  # the infinities
    assert conformance.difference(row) == "Refuses NaN (ValueError: no NaN here)."


@pytest.mark.parametrize("refuses", [{}, {"NaN": TypeError}, {"infinity": ValueError}, {"NaN": Exception}])
def test_an_error_that_the_offer_does_not_name_is_no_refusal(refuses):
    with pytest.raises(ValueError, match="no NaN here"):
        few(*casts_with(no_nan, refuses))


def test_what_is_to_be_refused_and_is_not_is_an_error():
    with pytest.raises(ValueError, match="the peer must refuse infinity; it took it"):
        few(*casts_with(lambda x: None, {"infinity": ValueError}))


def test_words_give_both_counts():
    (peer,) = registry.load("torch_casts")
    row = few(peer, peer.offer("E5M2 cast, saturating"))
    (found,) = row["divergences"]
    assert found["ordinary"] > found["special"] > 0
    both = f"({conformance.grouped(found['ordinary'])}; with NaN, inf: {conformance.grouped(found['special'])})."
    assert conformance.difference(row).endswith(both)


def test_special_values_are_not_credited_to_what_holds_for_finite_ones():
    peer = present("torchao_tensors")
    for subject, variant in (("NVFP4 1x16", "two levels"), ("FP8 current E4M3", "training")):
        divergences = peer.offer(subject, variant).divergences
        x = np.ones((128, 128), np.float32)
        x[5, 7] = np.nan
        ours = SUBJECTS[subject].arrays(refops, x)
        for divergence in divergences[:-1]:
            assert all((array == ours[name]).all() for name, array in divergence.predict(x).items())
        assert not all((array == ours[name]).all() for name, array in divergences[-1].predict(x).items())


def test_exit_code_tells_of_unexplained_differences(monkeypatch, capsys, tmp_path):
    out = tmp_path / "made" / "rows.json"
    assert conformance.main(["torch_casts", "--out", str(out)]) == 0
    assert conformance.unexplained(json.loads(out.read_text())["rows"][0]) == 0
    (peer,) = registry.load("torch_casts")
    faulty = dataclasses.replace(peer, offers=(with_fault(peer.offers[0], a_flipped_bit),))
    monkeypatch.setattr(registry, "load", lambda *names: [faulty])
    assert conformance.main(["torch_casts"]) == 1
    assert "unexplained" in capsys.readouterr().out


def test_unknown_peers_are_refused(capsys):
    with pytest.raises(SystemExit):
        conformance.main(["nobody"])
    assert "peers must be of" in capsys.readouterr().err


# --- absent peers ----------------------------------------------------------------------------------------------------


def test_absent_peers_are_listed_with_their_reason(monkeypatch):
    from peers import microxcaling_blocks

    def offers():
        raise ImportError("No module named 'mx'")

    monkeypatch.setattr(microxcaling_blocks, "offers", offers)
    (peer,) = registry.load("microxcaling_blocks")
    assert (peer.absent, peer.offers) == ("ImportError: No module named 'mx'", ())
    document = conformance.conformance([peer])
    assert document["rows"] == []
    assert document["peers"] == [{"name": "microxcaling", "versions": peer.packages, "absent": peer.absent}]
    assert "microxcaling | not installed" in conformance.markdown(document)


# --- formulas --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timed_inputs():
    rng = np.random.default_rng(0)
    pair, dy = (rng.standard_normal((128, k), np.float32).astype(ml_dtypes.bfloat16) for k in (768, 384))
    x = np.ascontiguousarray(pair[:, :384])
    return {
        "x": x,
        "pair": pair,
        "dy": dy,
        "mxfp8": refops.quantize(x, MXFP8),
        "nvfp4": refops.quantize(x, NVFP4),
    }


@pytest.mark.parametrize("module", ["torch_eager", pytest.param("jnp_formulas", marks=pytest.mark.full)])
def test_formulas_have_the_bits_of_refops(module, timed_inputs):
    """Where exp and tanh are another library's, a few codes may differ: one in a thousand here."""
    peer = present(module)
    assert {offer.subject for offer in peer.offers} >= {subjects[0] for subjects in TIMED.values()}
    for offer in peer.offers:
        subject = SUBJECTS[offer.subject]
        arguments = [timed_inputs[name] for name in subject.inputs]
        ours, theirs = subject.arrays(refops, *arguments), offer.compute(*arguments)
        assert set(ours) == set(theirs) == set(subject.formats)
        for name, mine in ours.items():
            fmt = subject.formats[name]
            differing = np.count_nonzero(comparable(mine, fmt) != comparable(theirs[name], fmt))
            assert differing <= (0 if subject.is_exact(name) else max(1, 1e-3 * mine.size)), (offer.subject, name)


def test_the_formulas_matrix_is_the_transform():
    x = np.random.default_rng(1).standard_normal((4, 16), np.float32)
    theirs = x.astype(np.float64) @ formulas.hadamard_matrix().astype(np.float64)
    np.testing.assert_allclose(theirs, refops.hadamard_transform(x), rtol=1e-6, atol=1e-6)


# --- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_inputs_are_ordinary_or_special(dtype):
    for dataset in inputs.tensors(inputs.DTYPES[dtype]):
        assert dataset.x.shape == (inputs.ROWS, inputs.COLUMNS)
        assert dataset.x.dtype == inputs.DTYPES[dtype]
        assert dataset.special == (not np.isfinite(dataset.x.astype(np.float32)).all()), dataset.name
    ordinary, nan, infinity = (
        d.x.astype(np.float32) for d in inputs.values_for_casts(refops.E4M3, inputs.DTYPES[dtype])
    )
    assert np.isfinite(ordinary).all()
    assert np.isnan(nan).all()
    assert np.isinf(infinity).all()
    assert nan.size
    assert infinity.size


def test_real_tensors_are_among_the_inputs():
    names = [name for name, _ in inputs.real_pieces()]
    assert len(names) == len(set(names)) >= 30
    assert sum(dataset.real for dataset in inputs.tensors(inputs.BFLOAT16)) == len(names)


def test_nan_codes_compare_as_one():
    codes = np.array([0x7F, 0xFF, 0x7E], np.uint8)
    assert len(set(comparable(codes, refops.E4M3))) == 2
    values = np.array([np.nan, -np.nan, 1], np.float32)
    assert len(set(comparable(values, None))) == 2
    every = np.arange(1 << 16, dtype=np.uint16)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        numbers = every.view(dtype)[~np.isnan(every.view(dtype).astype(np.float32))]
        assert len(set(comparable(numbers, None))) == numbers.size
        assert comparable(every.view(dtype)[-1:], None)[0] not in comparable(numbers, None)
    subnormal = np.array([0x7FFF, 0x7FC00000], np.uint32).view(np.float32)
    assert len(set(comparable(subnormal, None))) == 2


def test_reading_leaves_padding_out():
    x = np.ones((3, 64), np.float32)
    arrays = read(refops.quantize(x, MXFP8, columnwise=True))
    assert {name: array.shape for name, array in arrays.items()} == {
        "rowwise codes": (3, 64),
        "rowwise scales": (3, 2),
        "columnwise codes": (3, 64),
        "columnwise scales": (1, 64),
    }


# --- the committed table ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def committed():
    return json.loads(conformance.RESULTS.read_text())


def test_committed_table_has_the_present_peers_and_rows(committed):
    """`make conformance` writes it anew."""
    peers = {peer.name: peer for peer in registry.load(*OWN)}
    assert [peer["name"] for peer in committed["peers"]] == list(peers)
    for recorded in committed["peers"]:
        rows = {(row["subject"], row["variant"]) for row in committed["rows"] if row["peer"] == recorded["name"]}
        peer = peers[recorded["name"]]
        assert bool(rows) == (not recorded["absent"])
        if rows and not peer.absent:
            assert rows == {(o.subject, o.variant) for o in peer.offers if conformance.is_compared(peer, o)}
            names = {(o.subject, o.variant): {d.name: d.sentence for d in o.divergences} for o in peer.offers}
            for row in committed["rows"]:
                if row["peer"] == peer.name:
                    known = names[row["subject"], row["variant"]]
                    assert all(known.get(d["name"]) == d["sentence"] for d in row["divergences"]), row


def test_committed_table_explains_everything(committed):
    for row in committed["rows"]:
        assert conformance.unexplained(row) == 0
        for kind in conformance.KINDS:
            explained = sum(d[kind] for d in row["divergences"])
            assert row[kind]["agree"] + explained == row[kind]["elements"]
            assert sum(array[kind]["elements"] for array in row["arrays"].values()) == row[kind]["elements"]


def test_markdown_has_every_peer_and_count(committed):
    text = conformance.markdown(committed)
    for peer in committed["peers"]:
        assert f"| {peer['name']} " in text
    for row in committed["rows"]:
        assert conformance.title(row) in text
    assert all(line.count(" | ") == 5 for line in text.splitlines()[2:] if "not installed" not in line)
