# Starts writing to the file or device $TARGET without end, in random sizes and order, and returns
# as soon as /dev/$DISK has seen a few hundred writes of it.
writes() {
    awk '{ print $5 }' "/sys/block/$DISK/stat"
}
first=$(writes)
fio --name=load --filename="$TARGET" --direct=1 --ioengine=libaio --iodepth=32 --numjobs=2 \
    --size=16M --rw=randwrite --bsrange=4k-64k --time_based --runtime=3600 >/tmp/load.log 2>&1 &
load=$!
while [ "$(writes)" -lt $((first + 300)) ]; do
    kill -0 $load || { cat /tmp/load.log; exit 1; }
    usleep 10000
done
