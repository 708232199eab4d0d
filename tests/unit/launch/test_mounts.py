from __future__ import annotations

from feedtune.launch.mounts import parse_mountinfo
from feedtune.launch.rules import COVER, THROUGH, all_rules, listening_sockets

ROWS = """\
29 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 29 0:5 / /dev rw,nosuid - devtmpfs udev rw
31 30 0:6 / /dev/shm rw - tmpfs tmpfs rw
32 29 8:2 / /data rw - xfs /dev/sdb rw
33 32 0:40 / /data/ro ro,relatime - nfs host:/x rw
34 33 8:3 / /data/ro/scratch rw - ext4 /dev/sdc rw
35 29 8:9 / /super-ro rw - squashfs /dev/loop0 ro
36 29 8:4 / /mnt/a rw - ext4 /dev/sdd rw
37 36 8:5 / /mnt/a/b rw - ext4 /dev/sde rw
38 36 8:6 / /mnt/a rw - ext4 /dev/sdf rw
39 29 8:7 / /tmp/vol\\040x rw - ext4 /dev/sdg rw
"""


def test_hidden_mounts_are_not_seen() -> None:
    points = [mount.point for mount in parse_mountinfo(ROWS)]
    assert points.count("/mnt/a") == 1
    assert "/mnt/a/b" not in points
    assert points[0] == "/"
    assert "/tmp/vol x" in points


def test_each_writable_mount_in_a_covered_region_gets_its_own_cover() -> None:
    policy = {"protect": ["/home/me"], "passthrough": ["/dev", "/tmp"], "writable": []}
    rules = all_rules(policy, parse_mountinfo(ROWS))
    assert rules["/data"] == COVER
    assert rules["/data/ro"] == THROUGH
    assert rules["/data/ro/scratch"] == COVER, "a writable mount inside a read-only one"
    assert rules["/super-ro"] == THROUGH
    assert "/dev/shm" not in rules, "comes along with /dev"
    assert "/tmp/vol x" not in rules


def test_a_mount_inside_a_protected_folder_below_tmp_is_covered() -> None:
    policy = {"protect": ["/tmp"], "passthrough": ["/tmp", "/dev"], "writable": []}
    assert all_rules(policy, parse_mountinfo(ROWS))["/tmp/vol x"] == COVER


def test_only_sockets_in_covered_regions_are_listed() -> None:
    text = (
        "Num RefCount Protocol Flags Type St Inode Path\n"
        "0000: 00000002 00000000 00010000 0001 01 1 /run/a.sock\n"
        "0000: 00000002 00000000 00010000 0001 01 2 /home/me/agent\n"
        "0000: 00000002 00000000 00010000 0001 01 3 @abstract\n"
        "0000: 00000003 00000000 00000000 0001 03 4\n"
    )
    assert listening_sockets(text, {"/": COVER, "/run": THROUGH}) == ["/home/me/agent"]
