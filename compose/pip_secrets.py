"""Turns this machine's pip configuration into the build secrets "pip" and "ca".

`python3 compose/pip_secrets.py DIRECTORY` writes DIRECTORY/pip and DIRECTORY/ca, then runs until it
is killed. A build cannot see directories of this machine. This script therefore serves the
directories that hold indexes or wheels over loopback, for builds with `--network host`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import http.server
import shutil
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

_LOCATIONS = ("index-url", "extra-index-url", "find-links")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def configuration() -> dict[str, str]:
    """Return pip's settings, keyed by name, from this user's environment and files."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    pairs = (line.partition("=")[::2] for line in listed.splitlines())
    settings = {
        key.rpartition(".")[2]: str(ast.literal_eval(value))
        for key, value in pairs
        if key.startswith(("global.", ":env:"))
    }
    wanted = (*_LOCATIONS, "cert", "default-timeout")
    return {key: value for key, value in settings.items() if key in wanted}


def served(location: str, key: str, root: Path, url: str) -> str:
    """The URL under which a build finds a location.

    A local directory is linked in `root`, which is served at `url`. Other locations keep their URL.
    """
    path = Path(location.removeprefix("file://"))
    if not path.is_absolute():
        return location
    # An index may link to files beside it; a directory of wheels holds all its files.
    shown = path.parent
    if key == "find-links":
        shown = path
    link = root / str(len(list(root.iterdir())))
    link.symlink_to(shown, target_is_directory=True)
    return f"{url}/{link.name}/" + ("" if shown == path else path.name)


def main() -> None:
    """Write the secrets, then serve."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where the files pip and ca are written")
    target: Path = parser.parse_args().directory
    settings = configuration()
    with tempfile.TemporaryDirectory() as directory:
        handler = functools.partial(QuietHandler, directory=directory)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        url = f"http://127.0.0.1:{server.server_address[1]}"
        for key in _LOCATIONS:
            places = settings.get(key, "").split()
            if places:
                urls = [served(place, key, Path(directory), url) for place in places]
                settings[key] = " ".join(urls)
        ca = settings.get("cert") or ssl.get_default_verify_paths().cafile or "/dev/null"
        shutil.copyfile(ca, target / "ca")
        settings["cert"] = "/run/secrets/ca"
        lines = ["[global]", *(f"{key} = {value}" for key, value in settings.items())]
        (target / "pip").write_text("\n".join(lines) + "\n")
        server.serve_forever()


if __name__ == "__main__":
    main()
