"""Stub CANN libraries, so that the real torch_npu imports where no CANN and no device are.

Every undefined symbol of torch_npu's libraries that neither torch nor this process provides becomes a function that
reports an ACL failure; the device count is 0. One small library under the names that torch_npu asks for, in the folder
``torch_npu.libs`` that its RPATH lists. Nothing of CANN is read or copied; gcc and binutils are needed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

SYSTEM = re.compile(r"(libtorch|libc10|libstdc|libm\.|libgcc|libc\.|ld-|libpthread|libdl\.|librt\.)")
NOT_CANN = re.compile(r"_?Py|__gmon|_ITM|__cxa")
TORCH = re.compile(r"_ZNK?\d*(c10|2at|5torch|4c10d)")
BODIES = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *n) { if (n) *n = 0; return 0; }",
    "aclrtGetSocName": "const char *aclrtGetSocName(void) { return 0; }",
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "stub CANN: no device"; }',
    "aclAppLog": "void aclAppLog(void) { }",
    "aclFinalize": "int aclFinalize(void) { return 0; }",
}


def _out_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _symbols(library: Path, flag: str) -> list[tuple[str, str]]:
    """(type, name) of dynamic symbols."""
    rows = (line.split() for line in _out_of("nm", "-D", flag, str(library)).splitlines())
    return [(row[-2], row[-1]) for row in rows]


def _in_process(name: str) -> bool:
    return hasattr(ctypes.CDLL(None), name)


def make_stubs(site: Path) -> int:
    """Write the stubs for the torch_npu in ``site``; returns the number of symbols."""
    found = importlib.util.find_spec("torch")  # finds it without importing it
    if found is None or found.origin is None:
        sys.exit("install torch first")
    torch_libraries = Path(found.origin).parent.glob("lib/*.so*")
    own = sorted((site / "torch_npu").rglob("*.so"))
    provided = {n.split("@")[0] for lib in (*own, *torch_libraries) for _, n in _symbols(lib, "--defined-only")}
    needed, wanted, mine = set[str](), set[str](), {lib.name for lib in own}
    for lib in own:
        for name in re.findall(r"NEEDED\).*\[(.*?)\]", _out_of("readelf", "-d", str(lib))):
            if name not in mine and not SYSTEM.match(name):
                needed.add(name)
        wanted |= {n for kind, n in _symbols(lib, "--undefined-only") if kind == "U" and "@" not in n}
    names = sorted(n for n in wanted - provided if not NOT_CANN.match(n) and not _in_process(n))
    if lacking := [n for n in names if TORCH.match(n)]:
        sys.exit(f"torch lacks {len(lacking)} symbols of this torch_npu, versions differ: {lacking[:3]}")
    folder = site / "torch_npu.libs"
    folder.mkdir(exist_ok=True)
    lines = (
        BODIES.get(n, f'long f{i}(void) __asm__("{n}"); long f{i}(void) {{ return 1; }}') for i, n in enumerate(names)
    )
    (folder / "stub.c").write_text("\n".join(lines) + "\n", encoding="utf-8")
    first, *others = sorted(needed)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", str(folder / first), str(folder / "stub.c")], check=True
    )
    for name in others:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(first)
    return len(names)


if __name__ == "__main__":
    import sysconfig

    count = make_stubs(Path(sysconfig.get_paths()["purelib"]))
    print(f"{count} CANN symbols stubbed")
