# Puts a file system on /dev/$DISK and starts two loads in it: fio, which verifies a file, and
# tree_stress, which changes a tree of files and compares it with a model. Each repeats its rounds
# until moved-stop.sh. Returns after the first rounds.
rm -f /tmp/stop /tmp/fio.rounds /tmp/fio.failed /tmp/tree.log /tmp/tree.status
mkfs.ext4 -q -F "/dev/$DISK"
mount -t ext4 "/dev/$DISK" /mnt
mkdir /mnt/tree
(
    round=0
    until [ -e /tmp/stop ]; do
        round=$((round + 1))
        fio --name=verify --randseed=$round --filename=/mnt/fio --direct=1 --ioengine=libaio \
            --iodepth=16 --size=8M --rw=randwrite --bsrange=4k-64k --fsync=64 \
            --verify=crc32c --verify_fatal=1 --do_verify=1 >/tmp/fio.log 2>&1 ||
            { touch /tmp/fio.failed; break; }
        echo $round >>/tmp/fio.rounds
    done
) &
(
    status=0
    tree_stress /mnt/tree 32 /tmp/stop >/tmp/tree.log 2>&1 || status=$?
    echo $status >/tmp/tree.status
) &
