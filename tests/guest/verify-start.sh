# Writes the first 96 MiB of /dev/$DISK and reads them back, again and again, until verify-stop.sh
# asks for the end. Each block carries a CRC and the seed of its round, so that a block of an
# earlier round is detected. Returns when the disk has seen a few hundred writes.
writes() {
    awk '{ print $5 }' "/sys/block/$DISK/stat"
}
rm -f /tmp/verify.stop /tmp/verify.done
first=$(writes)
(
    round=0
    while [ ! -e /tmp/verify.stop ]; do
        round=$((round + 1))
        fio --name=verify --randseed=$round --filename="/dev/$DISK" --direct=1 \
            --ioengine=libaio --iodepth=32 \
            --numjobs=2 --size=32M --offset_increment=64M --rw=randwrite --bsrange=4k-64k \
            --fsync=64 --verify=crc32c --verify_fatal=1 --do_verify=1 \
            >/tmp/verify.log 2>&1 || break
        echo round >>/tmp/verify.done
    done
    [ -e /tmp/verify.stop ] && echo end >>/tmp/verify.done
) &
while [ "$(writes)" -lt $((first + 300)) ]; do
    kill -0 $! || { cat /tmp/verify.log; exit 1; }
    usleep 10000
done
