# Ends what load-start.sh has started. It must have gone well up to here.
killall -INT fio
while killall -0 fio 2>/dev/null; do
    usleep 10000
done
cat /tmp/load.log
! grep -qiE 'error|fail' /tmp/load.log
