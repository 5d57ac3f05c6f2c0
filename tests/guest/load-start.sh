# Writes to the file or device $TARGET in random sizes and order, again and again, until
# load-stop.sh asks for the end. Returns as soon as /dev/$DISK has seen a few hundred writes of it.
#
# Each run ends by itself: after a signal, fio 3.33 may wait for ever for I/O that was never begun,
# on any disk.
writes() {
    awk '{ print $5 }' "/sys/block/$DISK/stat"
}
rm -f /tmp/load.stop /tmp/load.done
first=$(writes)
(
    while [ ! -e /tmp/load.stop ]; do
        fio --name=load --filename="$TARGET" --direct=1 --ioengine=libaio --iodepth=32 \
            --numjobs=2 --size=16M --loops=4 --rw=randwrite --bsrange=4k-64k \
            >/tmp/load.log 2>&1 || { echo failed >>/tmp/load.log; break; }
    done
    echo end >/tmp/load.done
) &
while [ "$(writes)" -lt $((first + 300)) ]; do
    [ ! -e /tmp/load.done ] || { cat /tmp/load.log; exit 1; }
    usleep 10000
done
