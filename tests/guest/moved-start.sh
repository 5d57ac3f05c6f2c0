# Puts a file system on each of $DISKS and starts two loads there: fio, which verifies a file, and
# tree_stress, which changes a tree of files and compares it with a model. Each repeats its rounds
# until moved-stop.sh. fio reads back each few of its writes.
rm -f /tmp/stop
verify() {
    round=0
    status=0
    until [ -e /tmp/stop ] || [ $status != 0 ]; do
        round=$((round + 1))
        fio --name=verify --thread --randseed=$round --filename="/mnt/$1/fio" --direct=1 \
            --ioengine=libaio --iodepth=16 --size=16M --rw=randwrite --bsrange=4k-64k --fsync=64 \
            --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_backlog=16 \
            >"/tmp/$1.fio" 2>&1 || status=$?
    done
    echo $status >"/tmp/$1.fio.status"
}
change() {
    status=0
    tree_stress "/mnt/$1/tree" 32 /tmp/stop >"/tmp/$1.tree" 2>&1 || status=$?
    echo $status >"/tmp/$1.tree.status"
}
for disk in $DISKS; do
    mkfs.ext4 -q -F "/dev/$disk"
    mkdir "/mnt/$disk"
    mount -t ext4 "/dev/$disk" "/mnt/$disk"
    mkdir "/mnt/$disk/tree"
    verify "$disk" &
    change "$disk" &
done
