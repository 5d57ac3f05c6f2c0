# Writes to the file or device $TARGET in random sizes and order, again and again, until the guest
# ends. Returns as soon as /dev/$DISK has seen a few hundred writes of it.
writes() {
    awk '{ print $5 }' "/sys/block/$DISK/stat"
}
first=$(writes)
(
    while fio --name=load --filename="$TARGET" --direct=1 --ioengine=libaio --iodepth=32 \
        --numjobs=2 --size=16M --loops=4 --rw=randwrite --bsrange=4k-64k \
        >/tmp/load.log 2>&1; do :; done
) &
while [ "$(writes)" -lt $((first + 300)) ]; do
    kill -0 $! || { cat /tmp/load.log; exit 1; }
    usleep 10000
done
