"""Turns this machine's pip configuration into the build secrets "pip" and "ca", and serves its local directories meanwhile.

`python3 compose/pip_secrets.py DIRECTORY` writes DIRECTORY/pip and DIRECTORY/ca, then runs until it is killed. A build cannot see
directories of this machine, so indexes and wheels that lie in some are served over loopback, for builds with `--network host`.
"""

from __future__ import annotations

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
    """Says nothing for each file."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def configuration() -> dict[str, str]:
    """pip's settings by name, as this user's environment and files give them."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    pairs = (line.partition("=")[::2] for line in listed.splitlines())
    settings = {
        key.rpartition(".")[2]: str(ast.literal_eval(value))
        for key, value in pairs
        if key.startswith(("global.", ":env:"))
    }
    return {
        key: value
        for key, value in settings.items()
        if key in (*_LOCATIONS, "cert", "default-timeout")
    }


def served(location: str, key: str, root: Path, url: str) -> str:
    """The URL that a location is to be had under: its own, or below `url` through a link in `root` if it is a local directory."""
    path = Path(location.removeprefix("file://"))
    if not path.is_absolute():
        return location
    # The pages of an index may point to files beside the index; a directory of wheels has all within.
    shown = path if key == "find-links" else path.parent
    link = root / str(len(list(root.iterdir())))
    link.symlink_to(shown, target_is_directory=True)
    return f"{url}/{link.name}/" + ("" if shown == path else path.name)


def main() -> None:
    """Write the secrets, then serve."""
    target = Path(sys.argv[1])
    settings = configuration()
    with tempfile.TemporaryDirectory() as directory:
        handler = functools.partial(QuietHandler, directory=directory)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        url = f"http://127.0.0.1:{server.server_address[1]}"
        for key in _LOCATIONS:
            places = settings.get(key, "").split()
            if places:
                settings[key] = " ".join(
                    served(place, key, Path(directory), url) for place in places
                )
        shutil.copyfile(
            settings.get("cert") or ssl.get_default_verify_paths().cafile or "/dev/null",
            target / "ca",
        )
        settings["cert"] = "/run/secrets/ca"
        (target / "pip").write_text(
            "[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items())
        )
        server.serve_forever()


if __name__ == "__main__":
    main()
