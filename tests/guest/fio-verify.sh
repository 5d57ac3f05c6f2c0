# Writes half of /dev/$DISK in random sizes and order, from two jobs at depth 32 with flushes in
# between, and reads all of it back; each block carries a CRC. MIN_BYTES is the smallest request.
fio --name=verify --filename="/dev/$DISK" --direct=1 --ioengine=libaio --iodepth=32 \
    --numjobs=2 --size=32M --offset_increment=64M --rw=randwrite --bsrange="$MIN_BYTES-128k" \
    --fsync=64 --verify=crc32c --verify_fatal=1 --do_verify=1 \
    --group_reporting
