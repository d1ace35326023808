from infra.held_files import HeldFiles
from infra.object_store import ObjectStore


def test_every_store_at_a_url_sees_the_same_objects_until_they_are_forgotten() -> None:
    ObjectStore("held://one/samples").put("a", b"1")
    ObjectStore("held://two/samples").put("a", b"2")
    assert ObjectStore("held://one").get("samples/a") == b"1"
    HeldFiles.forget("one")
    assert not ObjectStore("held://one/samples").exists("a")
    assert ObjectStore("held://two/samples").get("a") == b"2"
    HeldFiles.forget("one")
    HeldFiles.forget("two")
