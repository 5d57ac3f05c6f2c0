# Prints the attributes of the disk $DISK in the guest's kernel, one "name=value" per line.
cd "/sys/block/$DISK"
show() {
    echo "$1=$(cat "$2")"
}
show sectors size
show serial serial
show read_only ro
show logical_block_size queue/logical_block_size
show write_cache queue/write_cache
show discard_max_bytes queue/discard_max_bytes
show write_zeroes_max_bytes queue/write_zeroes_max_bytes
show features device/features
echo "queues=$(ls mq | wc -l)"
