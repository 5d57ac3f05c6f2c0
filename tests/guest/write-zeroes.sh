# Zeroes and discards parts of written data and looks at these parts and their neighbours.
# The path is needed: busybox prefers its own blkdiscard, which knows fewer options.
device="/dev/$DISK"
MIB=1048576

checksum() { # first MiB, number of MiB
    dd if="$device" bs=$MIB skip="$1" count="$2" iflag=direct 2>/dev/null | md5sum
}
nonzero_bytes() { # first MiB, number of MiB
    dd if="$device" bs=$MIB skip="$1" count="$2" iflag=direct 2>/dev/null | tr -d '\0' | wc -c
}

dd if=/dev/urandom of=/tmp/random bs=$MIB count=16 2>/dev/null
dd if=/tmp/random of="$device" bs=$MIB oflag=direct 2>/dev/null
rm /tmp/random
before=$(checksum 0 2)
between=$(checksum 6 4)
after=$(checksum 13 3)

/usr/sbin/blkdiscard --zeroout --offset $((2 * MIB)) --length $((4 * MIB)) "$device"
/usr/sbin/blkdiscard --offset $((10 * MIB)) --length $((3 * MIB)) "$device"

[ "$(nonzero_bytes 2 4)" = 0 ] || { echo "write zeroes left data behind"; exit 1; }
[ "$(nonzero_bytes 10 3)" = 0 ] || { echo "discard left data behind"; exit 1; }
[ "$(checksum 0 2)" = "$before" ] || { echo "data in front has changed"; exit 1; }
[ "$(checksum 6 4)" = "$between" ] || { echo "data in between has changed"; exit 1; }
[ "$(checksum 13 3)" = "$after" ] || { echo "data behind has changed"; exit 1; }
