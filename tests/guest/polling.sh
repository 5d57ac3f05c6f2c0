# Runs ringhaul with $BENCH on /dev/vda: against a server with the options $SERVE, or directly where
# that is empty. Prints the number of interrupts of the disk's queues during the run, the server's
# log, and the report as JSON.
ringhaul="$(echo /mnt/ld-*) --library-path /mnt /mnt/ringhaul"
interrupts() {
    device=$(basename "$(readlink -f /sys/block/vda/device)")
    awk -v queue="$device-req" 'index($0, queue) {
        for (i = 2; i <= NF; i++) if ($i ~ /^[0-9]+$/) sum += $i
    } END { print sum + 0 }' /proc/interrupts
}
before=$(interrupts)
if [ -n "$SERVE" ]; then
    $ringhaul serve --socket-path /run/polling.sock --blk-file /dev/vda $SERVE 2>/run/polling.log &
    server=$!
    until [ -S /run/polling.sock ]; do
        kill -0 $server || { cat /run/polling.log; exit 1; }
        usleep 10000
    done
    disk="--socket-path /run/polling.sock"
else
    disk="--filename /dev/vda"
    : >/run/polling.log
fi
$ringhaul bench $disk $BENCH --eta never --output-format json --output /run/report
if [ -n "$SERVE" ]; then
    kill $server
    wait $server
fi
echo "interrupts $(($(interrupts) - before))"
sed 's/^/log /' /run/polling.log
cat /run/report
