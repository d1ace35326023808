"""A PostgreSQL server of the cluster's own, for Prefect: its folder, port and password are no one else's."""

import os
import pwd
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

from infra.cluster.config import ClusterConfig, Ports
from infra.cluster.parts import Part, program
from infra.cluster.ports import LOOPBACK

ROLE = "tutti"


class PostgresFailed(RuntimeError):
    """PostgreSQL's files could not be made. The message says why."""


def postgres_program(name: str) -> str:
    """A program of PostgreSQL, wherever Debian puts it. Raises `PartMissing`."""
    for found in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True):
        return str(found)
    return program(name, "apt-get install postgresql, or leave --postgres out")


def postgres(config: ClusterConfig, ports: Ports) -> tuple[Part, str]:
    """The server, its files made if need be, and the URL for Prefect.

    Raises `PartMissing` and `PostgresFailed`.
    """
    folder = config.folder / "postgres"
    user = config.postgres_user if os.geteuid() == 0 else None
    try:
        password = _password(config.folder, user)
        if not (folder / "PG_VERSION").exists():
            _make(folder, user)
    except LookupError as error:
        raise PostgresFailed(f"there is no user {user!r} ({error}): name one by --postgres-user") from None
    command = [
        postgres_program("postgres"),
        *("-D", str(folder), "-p", str(ports.postgres), "-k", str(folder)),
        *("-c", f"listen_addresses={LOOPBACK}", "-c", "max_connections=60"),
    ]
    url = f"postgresql+asyncpg://{ROLE}:{password}@{LOOPBACK}:{ports.postgres}/postgres"
    return Part("postgres", command, ports.postgres, {}, user=user), url


def _password(folder: Path, user: str | None) -> str:
    path = folder / "postgres.password"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(24))
        if user is not None:
            shutil.chown(path, user)
    return path.read_text()


def _make(folder: Path, user: str | None) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    if user is not None:
        shutil.chown(folder, user, _group_of(user))
    arguments = ["-U", ROLE, "-A", "scram-sha-256", f"--pwfile={folder.parent / 'postgres.password'}"]
    done = subprocess.run(
        [postgres_program("initdb"), "-D", str(folder), "-E", "UTF8", *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
        **as_user(user),
    )
    if done.returncode != 0:
        raise PostgresFailed(
            f"initdb failed: {done.stderr.strip()} (the user {user or 'you'} must be able to enter {folder})"
        )


def as_user(user: str | None) -> dict[str, Any]:
    """Arguments of `subprocess` that run a program as this user; none for None."""
    return {} if user is None else {"user": user, "group": _group_of(user), "extra_groups": []}


def _group_of(user: str) -> int:
    return pwd.getpwnam(user).pw_gid
