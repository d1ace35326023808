"""Credentials travel by the environment alone."""

import json
import os
import subprocess
import sys
import uuid

import fsspec
import psutil
import pytest
from fsspec.config import conf

from infra.children import Child
from infra.credentials import (
    CredentialsInUrl,
    into_environment,
    refuse_credentials,
    without_credentials,
)
from infra.object_store import ObjectStore
from tests.s3_server import S3Server


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSSPEC_S3", "{}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(conf, "s3", {})
    # fsspec keeps file systems by their options, and botocore's environment is none of these.
    fsspec.get_filesystem_class("s3").clear_instance_cache()


READ = """
import sys
from infra.object_store import ObjectStore
print(ObjectStore(sys.argv[1]).get("x").decode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["block", "aws"])
def test_this_process_and_its_children_open_a_store_by_its_url_alone(
    clean: None, monkeypatch: pytest.MonkeyPatch, s3: S3Server, by: str
) -> None:
    url = f"s3://tutti/{uuid.uuid4().hex}"
    if by == "block":
        into_environment("s3", s3.options)
    else:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
    ObjectStore(url).put("x", b"hello")
    child = subprocess.run([sys.executable, "-c", READ, url], capture_output=True, text=True, timeout=60)
    assert child.stdout.strip() == "hello", child.stderr


@pytest.mark.slow
def test_a_store_that_refuses_is_an_error_and_not_an_absent_object(clean: None, s3: S3Server) -> None:
    store = ObjectStore("s3://tutti/x", {**s3.options, "secret": "wrong"})
    with pytest.raises(PermissionError):
        store.exists("campaign.yaml")


def test_options_are_added_to_those_that_are_there(clean: None) -> None:
    into_environment("s3", {"key": "a", "secret": "b"})
    into_environment("s3", {"secret": "c", "client_kwargs": {"region_name": "r"}})
    expected = {"key": "a", "secret": "c", "client_kwargs": {"region_name": "r"}}
    assert json.loads(os.environ["FSSPEC_S3"]) == expected
    assert conf["s3"] == expected


def test_an_environment_without_credentials_keeps_the_rest() -> None:
    environment = {
        "PATH": "/bin",
        "FSSPEC_S3": "{}",
        "FSSPEC_GS_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SESSION_TOKEN": "x",
        "AWS_REGION": "eu",
    }
    assert without_credentials(environment) == {"PATH": "/bin", "AWS_REGION": "eu"}


async def test_children_that_run_code_of_others_do_not_get_them(
    clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    into_environment("s3", {"secret": "hunter2"})
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    child = await Child.start("tests.infra.obedient_child", {})
    try:
        assert "hunter2" not in "".join(psutil.Process(child.pid).environ().values())
    finally:
        await child.stop()


def test_a_url_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(CredentialsInUrl) as caught:
        refuse_credentials("s3://name:hunter2@bucket/prefix")
    assert "hunter2" not in str(caught.value)
    assert "stores.block" in str(caught.value)
    refuse_credentials("s3://bucket/prefix")
    refuse_credentials("abfs://container@account.example.net/x")
    refuse_credentials("/a/plain/folder")
