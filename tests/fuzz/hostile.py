"""Files as an attacker or a broken disk leaves them: safetensors, npy, npz and pt, whole, mutated and hostile.

Every maker takes a `Case` and a path, writes one file, and returns name -> array where the file is whole and the reader
must give exactly these, or None where anything but a crash is right. Payloads would make `case.canary` if they ran.
"""

import io
import json
import os
import pickle
import struct
import warnings
import zipfile

import ml_dtypes
import numpy as np
from arguments_fuzz import FLOAT_DTYPES, contents, shape

SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "float64": "F64"}
NAMES = (
    "x",
    "dy",
    "data",
    "scale",
    "rowwise_data",
    "layers.10.w",
    "layers.2.w",
    "a b",
    "ü",
    "日本",
    "x\n",
    "\x1b[31m",
    "",
    "w" * 300,
    "[bold]",
    "../up",
    "__proto__",
)


def arrays(case, most=3):
    """Name -> array of a few small tensors."""
    made = {}
    for _ in range(case.below(most, 1) if most > 1 else 1):
        dtype = case.choose([*FLOAT_DTYPES, *FLOAT_DTYPES, np.dtype(np.uint8), np.dtype(np.float64)])
        made[case.choose(NAMES)] = contents(case, shape(case, low=1), dtype)
    return made


# --- mutations of bytes -----------------------------------------------------------------------------------------------


def mutated(case, data, other=b""):
    """`data` truncated, with bits flipped, spliced, repeated, zeroed, or with a length changed."""
    data = bytearray(data)
    for _ in range(case.below(3, 1)):
        size, how = len(data), case.below(9)
        if not size:
            break
        at, near = case.below(size), case.below(min(size, 400))
        if how == 0:
            del data[at:]
        elif how == 1:
            data[near] ^= 1 << case.below(8)
        elif how == 2:
            data[at] ^= 1 << case.below(8)
        elif how == 3:
            data[near:near] = bytes(data[at : at + case.below(64)])
        elif how == 4:
            data[near : near + case.below(16)] = case.rng.bytes(case.below(16))
        elif how == 5:
            data[at:] = other[case.below(len(other) + 1) :]
        elif how == 6:
            data[near : near + 8] = struct.pack("<Q", case.choose([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, size]))
        elif how == 7:
            del data[near : near + case.below(32)]
        else:
            data += case.rng.bytes(case.below(100))
    return bytes(data)


# --- safetensors ------------------------------------------------------------------------------------------------------


def safetensors_bytes(header, data, length=None):
    """A file of this header (plain data or bytes) and these bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", (len(text) if length is None else length) % 2**64) + text + data


def whole_safetensors(case, path, made=None):
    """A file that is right."""
    made = arrays(case) if made is None else made
    header, chunks, offset = {}, [], 0
    if case.chance(0.3):
        header["__metadata__"] = {"format": "pt", "note": case.choose(NAMES)}
    for name, array in made.items():
        data = np.ascontiguousarray(array).tobytes()
        entry = {"dtype": SAFETENSORS_NAMES[array.dtype.name], "shape": list(array.shape)}
        header[name] = entry | {"data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    path.write_bytes(safetensors_bytes(header, b"".join(chunks)))
    return made


def hostile_safetensors(case, path):
    """A header that lies."""
    data = case.rng.bytes(64)
    entry = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    big = case.choose([2**31, 2**32, 2**40, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30])
    headers = (
        lambda: ({"x": entry}, case.choose([0, 1, 7, 2**31, 2**32, 2**63, 2**64 - 1, 10**6])),
        lambda: {"x": entry, "y": entry},
        lambda: {
            "x": entry
            | {
                "data_offsets": case.choose(
                    [
                        [0, 63],
                        [64, 0],
                        [-64, 0],
                        [0, big],
                        [big, big + 64],
                        [32, 96],
                        [0.0, 64.0],
                        ["0", "64"],
                        [],
                        [0],
                        None,
                        [True, 64],
                    ]
                )
            }
        },
        lambda: {
            "x": entry
            | {
                "shape": case.choose(
                    [
                        [big, big],
                        [0, big],
                        [-4, -4],
                        [4.0, 4],
                        [16],
                        [],
                        [2] * 4,
                        [1] * 70,
                        [1] * 20 + [16],
                        [0],
                        None,
                        "44",
                        [[4], [4]],
                        [big],
                        [4, True],
                    ]
                )
            }
        },
        lambda: {"x": entry | {"shape": [0, case.choose([0, 5, big])], "data_offsets": [0, 0]}},
        lambda: {
            "x": entry
            | {
                "dtype": case.choose(
                    [
                        "F31",
                        "f32",
                        "",
                        None,
                        32,
                        "BOOL",
                        "U8",
                        "F4",
                        "F8_E4M3",
                        "F8_E5M2",
                        "F8_E8M0",
                        "C64",
                        "F64",
                        "I64",
                        "F6_E2M3",
                        "O",
                        "V4",
                    ]
                )
            }
        },
        lambda: {
            "x": entry
            | {"dtype": "F4", "shape": case.choose([[8, 16], [128], [127, 1], [1, 129], []]), "data_offsets": [0, 64]}
        },
        lambda: b'{"x":' + json.dumps(entry).encode() + b',"x":' + json.dumps(entry).encode() + b"}",
        lambda: b'{"x":' * 5000 + b"1" + b"}" * 5000,
        lambda: b"[" * case.choose([100, 100000]) + b"]" * 100,
        lambda: b'{"x":{"dtype":"F32","shape":' + b"[" * 20000 + b"]" * 20000 + b',"data_offsets":[0,64]}}',
        lambda: json.dumps({"x": entry}).encode() + b" " * case.choose([10**5, 10**6]),
        lambda: json.dumps(
            {f"x{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20000)}
        ).encode(),
        lambda: b'{"\xff\xfe":' + json.dumps(entry).encode() + b"}",
        lambda: b'{"\\ud800":' + json.dumps(entry).encode() + b"}",
        lambda: {
            "__metadata__": case.choose(
                [None, 1, [], {"a": 1}, {"refops": "{}"}, {"refops": "null"}, {"refops": "[" * 50000}, "text"]
            ),
            "x": entry,
        },
        lambda: {"x": case.choose([None, 1, [], {}, "x", {"dtype": "F32"}])},
        lambda: b"{}",
        lambda: b"{",
        lambda: b"{" + b"\0" * 100,
        lambda: b'{"x": NaN}',
        lambda: {case.choose(NAMES) + "\x00": entry},
        lambda: {"x": entry | {"data_offsets": [0, 64], "more": 1}},
    )
    header, length = case.choose(headers)(), None
    if isinstance(header, tuple):
        header, length = header
    path.write_bytes(safetensors_bytes(header, data[: case.choose([64, 64, 0, 63])], length))


# --- npy and npz ------------------------------------------------------------------------------------------------------


def npy_bytes(array):
    """An npy file, of ml_dtypes' arrays as raw bytes, as `np.save` writes it."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def npy_with_header(header, data, version=(1, 0), length=None):
    """An npy file of any header text."""
    text = header.encode("latin-1", "replace")
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    wide = version[0] > 1
    size = struct.pack("<I" if wide else "<H", (len(text) if length is None else length) % (1 << (32 if wide else 16)))
    return b"\x93NUMPY" + bytes(version) + size + text + data


class Payload:
    """Unpickled, it would make a file."""

    def __init__(self, path, way=0):
        self.path, self.way = str(path), way

    def __reduce__(self):
        if self.way == 0:
            return os.system, (f"touch {self.path}",)
        if self.way == 1:
            return eval, (f"open({self.path!r}, 'w').close()",)
        return exec, (f"open({self.path!r}, 'w').close()",)


def whole_npy(case, path):
    """An npy file that is right."""
    array = contents(
        case, shape(case, low=0), case.choose([np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.float64)])
    )
    np.save(path, np.asfortranarray(array) if array.ndim and case.chance(0.3) else array)
    return {path.stem: array}


def hostile_npy_bytes(case):
    """An npy file whose header lies, or that holds a pickle."""
    data, big = case.rng.bytes(64), case.choose([2**31, 2**40, 2**62, 2**63, 2**64, 10**40])
    payload = f"__import__('os').system('touch {case.canary}')"

    def header(descr="'<f4'", order="False", sizes="(4, 4)"):
        return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {sizes}, }}"

    makers = (
        lambda: npy_bytes(np.array([Payload(case.canary, case.below(3))], object)),
        lambda: npy_bytes(np.array([{"a": 1}, None], object)),
        lambda: npy_with_header(payload, data),
        lambda: npy_with_header(header(payload), data),
        lambda: npy_with_header(header(sizes=f"({payload},)"), data),
        lambda: npy_with_header(header(sizes=f"({big}, {case.choose([1, 2, big])})"), data),
        lambda: npy_with_header(
            header(
                sizes=case.choose(
                    [
                        "(-4, -4)",
                        "(0, -1)",
                        "4",
                        "(4.0, 4)",
                        "None",
                        "(True, 4)",
                        "[4, 4]",
                        "('4', 4)",
                        "()",
                        "(0,)",
                        "(1,) * 65",
                        "(" + "1," * 65 + ")",
                        "(16,)",
                    ]
                )
            ),
            data,
        ),
        lambda: npy_with_header(
            header(
                case.choose(
                    [
                        "'O'",
                        "'|O'",
                        "'<f3'",
                        "'V1000000000'",
                        "'V0'",
                        "'U1000000000'",
                        "''",
                        "None",
                        "1",
                        "'<M8[s]'",
                        "'f4,f4'",
                        "[('a', '<f4'), ('a', '<f4')]",
                        "[('a', 'O')]",
                        "'>f4'",
                        "'<c8'",
                        "'V2'",
                        "'|b1'",
                        "'<f16'",
                        "'S0'",
                        "('<f4', (4, 4))",
                        "'<f4' * 1000000",
                    ]
                )
            ),
            data,
        ),
        lambda: npy_with_header(header(order=case.choose(["1", "None", "'yes'", "[]"])), data),
        lambda: npy_with_header(
            case.choose(
                [
                    "",
                    "{",
                    "{}",
                    "[]",
                    "1",
                    "(" * 5000,
                    "-" * 9000 + "1",
                    "{'descr': '<f4'}",
                    "{'a': 1, 'b': 2, 'c': 3}",
                    "\0" * 30,
                    "{" * 100 + "}" * 100,
                ]
            ),
            data,
        ),
        lambda: npy_with_header(
            header(), data, version=case.choose([(0, 0), (1, 1), (2, 0), (3, 0), (4, 0), (255, 255)])
        ),
        lambda: npy_with_header(header(), data, length=case.choose([0, 1, 10, 65535])),
        lambda: npy_with_header(header(), data, version=(2, 0), length=case.choose([2**31, 2**32 - 1])),
        lambda: npy_with_header(header() + " " * 60000, data),
        lambda: npy_with_header("(1 for x in ())", data),
        lambda: npy_with_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': (4, {'9' * 5000}), }}", data),
        lambda: pickle.dumps(Payload(case.canary)),
        lambda: pickle.dumps(Payload(case.canary), protocol=case.below(6)),
    )
    return case.choose(makers)()


def hostile_npy(case, path):
    path.write_bytes(hostile_npy_bytes(case))


def whole_npz(case, path):
    """An npz file that is right."""
    made = {}
    for name in ("x", "dy", "scale")[: case.below(4, 1)]:
        made[name] = contents(
            case, shape(case, low=0), case.choose([np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint8)])
        )
    (np.savez_compressed if case.chance(0.5) else np.savez)(path, **made)
    return made


def hostile_npz(case, path):
    """A zip file of surprises."""
    good = npy_bytes(np.arange(12, dtype=np.float32))
    how = case.below(14)
    compression = case.choose([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    if how == 1:
        compression = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(path, "w", compression) as archive:
        if how == 0:
            for name in ("../../evil.npy", "/etc/evil.npy", "a/../b.npy", "C:\\evil.npy", ".npy", "a//b.npy"):
                archive.writestr(name, good)
        elif how == 1:  # a bomb: 64 MB of zeros in 64 KB
            with archive.open("x.npy", "w", force_zip64=True) as member:
                member.write(npy_with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (16777216,), }", b""))
                for _ in range(64):
                    member.write(bytes(1 << 20))
        elif how == 2:
            inner = io.BytesIO()
            with zipfile.ZipFile(inner, "w") as nested:
                nested.writestr("x.npy", good)
            archive.writestr("x.npy", inner.getvalue())
        elif how == 3:
            archive.writestr("x.txt", "words")
            archive.writestr("x", good)
        elif how == 4:
            archive.writestr("x.npy", hostile_npy_bytes(case))
            archive.writestr("y.npy", good)
        elif how == 5:
            archive.writestr("folder/", "")
            archive.writestr("folder.npy/", "")
        elif how == 6:
            for _ in range(case.choose([1, 2000])):
                archive.writestr(f"{case.below(10**9)}.npy", good)
        elif how == 7:
            archive.writestr("x.npy", b"")
        elif how == 8:
            archive.writestr("x.npy", good[: case.below(len(good))])
        elif how == 9:
            archive.writestr("x\x1b[2J\n.npy", good)
            archive.writestr("é\u202e.npy", good)
        elif how != 10:  # else: an empty archive
            archive.writestr("x.npy", good)
            archive.writestr("x.npz", good)
    data = bytearray(path.read_bytes())
    if how == 11 or case.chance(0.15):  # marked as encrypted, here and in the directory
        for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            at = data.find(signature)
            if at >= 0 and at + offset < len(data):
                data[at + offset] |= 1
    if how == 12:  # another size in the directory
        at = data.find(b"PK\x01\x02")
        data[at + 20 : at + 28] = struct.pack("<II", case.choose([0, 1, 2**31, 2**32 - 1]), case.choose([0, 2**32 - 1]))
    if how == 13:
        del data[data.rfind(b"PK\x05\x06") :]
    path.write_bytes(data)


# --- pt ---------------------------------------------------------------------------------------------------------------


def torch_tensor(array):
    """A torch tensor of the same elements."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def nested_tensor():
    """A tensor of rows of several lengths; torch warns that these are a prototype."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])


def whole_pt(case, path):
    """A pt file that is right, in the zip or the legacy format."""
    import torch

    made = {f"t{i}": array for i, array in enumerate(arrays(case).values())}
    torch.save(
        {name: torch_tensor(array) for name, array in made.items()},
        path,
        _use_new_zipfile_serialization=case.chance(0.7),
    )
    return made


def hostile_pt(case, path):
    """Pickles with payloads, nested content without end, storages that are too small."""
    import torch

    how = case.below(13)
    value = torch.arange(16.0)
    if how == 0:
        path.write_bytes(pickle.dumps(Payload(case.canary, case.below(3)), protocol=case.choose([2, 3, 4, 5])))
    elif how == 1:
        torch.save({"x": value, "evil": Payload(case.canary, case.below(3))}, path)
    elif how == 2:
        torch.save(
            {"x": value, "evil": Payload(case.canary, case.below(3))}, path, _use_new_zipfile_serialization=False
        )
    elif how == 3:  # the payload in the pickle of a good archive
        torch.save({"x": value}, path)
        _replace_member(path, "data.pkl", lambda data: pickle.dumps(Payload(case.canary), protocol=2))
    elif how == 4:  # the storage is cut
        torch.save({"x": value}, path)
        _replace_member(path, "data/0", lambda data: data[: case.below(len(data))])
    elif how == 5:  # contains itself
        content = {"x": value}
        content["again"] = [content]
        torch.save(content, path)
    elif how == 6:  # laughs: a few bytes that name one list a hundred million times
        content = [] if case.chance(0.5) else [value]
        for _ in range(10):
            content = [content] * 10
        torch.save(content, path)
    elif how == 7:
        content = value
        for _ in range(case.choose([100, 900])):
            content = [content]
        torch.save(content, path)
    elif how == 8:
        content = case.choose(
            [
                value.to_sparse(),
                value.double(),
                value.to(torch.complex64),
                value.bool(),
                torch.tensor(1.0),
                torch.empty(0),
                value.requires_grad_(),
                torch.nn.Parameter(value),
                value.to(torch.float8_e4m3fn),
                value.long(),
                value.expand(1 << 12, 16),
                torch.ones(1).expand(1 << 17, 1 << 17),
                torch.ones(1).expand(1 << 30, 1 << 30),
                [torch.ones(1 << 14)] * 20000,
                nested_tensor(),
                value.as_strided((3, 3), (0, 1)),
                "text",
                None,
                1,
                {},
                [],
                {1: value, (2, 3): value},
                torch.conj(value.to(torch.complex64)),
                value.to("meta"),
            ]
        )
        torch.save({"x": content} if case.chance(0.5) else content, path)
    elif how == 9:  # sizes and strides beyond the storage
        torch.save({"x": value}, path)
        _replace_member(
            path,
            "data.pkl",
            lambda data: data.replace(
                b"K\x10\x85", case.choose([b"K\xff\x85", b"J\xff\xff\xff\x7f\x85", b"J\xff\xff\xff\xff\x85"])
            ),
        )
    elif how == 10:
        torch.save(torch.nn.Linear(2, 2), path)
    elif how == 11:
        path.write_bytes(
            case.choose(
                [
                    b"\x80\x02.",
                    b"\x80\x02N.",
                    b"\x80\x05" + b"(" * 100000,
                    b"\x80\x02" + b"]" * 50000 + b".",
                    b"PK\x03\x04",
                    b"\x80\x02cos\nsystem\n(S'touch %s'\ntR." % str(case.canary).encode(),
                ]
            )
        )
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", pickle.dumps(Payload(case.canary), protocol=2))
            archive.writestr("a/version", "3")
            archive.writestr("a/byteorder", case.choose(["little", "big", "middle"]))


def _replace_member(path, suffix, change):
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members:
            archive.writestr(name, change(data) if name.endswith(suffix) else data)


WHOLE = {".safetensors": whole_safetensors, ".npy": whole_npy, ".npz": whole_npz, ".pt": whole_pt}
HOSTILE = {".safetensors": hostile_safetensors, ".npy": hostile_npy, ".npz": hostile_npz, ".pt": hostile_pt}


def make(case, path, suffix):
    """Write a file at `path`: whole (returns what is in it), mutated or hostile (returns None)."""
    kind = case.choose(["whole", "mutated", "mutated", "hostile", "hostile"])
    if kind == "hostile":
        HOSTILE[suffix](case, path)
        if case.chance(0.2):
            path.write_bytes(mutated(case, path.read_bytes()))
        return None
    made = WHOLE[suffix](case, path)
    if kind == "whole":
        return made
    whole = path.read_bytes()
    another = case.choose([suffix, *WHOLE]) if suffix == ".pt" else case.choose([".safetensors", ".npy", ".npz"])
    other = case.folder / f"other{another}"
    WHOLE[another](case, other)
    path.write_bytes(mutated(case, whole, other.read_bytes()))
    return None if path.read_bytes() != whole else made
