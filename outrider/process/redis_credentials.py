"""User and password of a Redis, for redis-py."""

from __future__ import annotations

from pathlib import Path

from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError


class Credentials(CredentialProvider):
    """User and password. The password's file is read for each connection, so it may change."""

    def __init__(self, user: str, password: str, password_file: Path | None) -> None:
        self._user = user
        self._password = password
        self._password_file = password_file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """The arguments of AUTH; raises OSError or UnicodeDecodeError if the file is unreadable."""
        password = self._password
        if self._password_file is not None:
            password = self._password_file.read_text().rstrip("\r\n")
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same, but raises AuthenticationError if the file is unreadable.

        After any other error redis-py would use the connection without AUTH.
        """
        try:
            return self.get_credentials()
        except (OSError, UnicodeDecodeError) as cause:
            raise AuthenticationError(f"{self._password_file} cannot be read") from cause
