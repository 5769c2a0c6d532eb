"""The processes behind the page under test."""

from __future__ import annotations

from stack import TARGET, Process, Stack, free_port


class Site:
    """A verifier, an n-gram drafter and a gateway; more drafters come and go as tests want."""

    def __init__(self) -> None:
        # Whether a draft pays depends on the machine; what the page shows of drafts should not.
        self.stack = Stack("--always-draft")
        self.stack.add_drafter("ngram-1", "ngram")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.gateway = Process(
            *("gateway", "--verifier", self.stack.address, "--tokenizer", TARGET),
            *("--http-port", str(port), "--grpc-listen", "127.0.0.1:0"),
        )
        self.stack.wait_ready()

    def remove_drafter(self, name: str, *, kill: bool = False) -> None:
        """Let a drafter say goodbye, or not."""
        process = self.stack.drafters.pop(name)
        if kill:
            process.kill()
        else:
            process.stop()
        process.log.close()

    def stop(self) -> None:
        self.gateway.stop()
        self.gateway.log.close()
        self.stack.stop()
