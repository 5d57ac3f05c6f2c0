# Ends what load-start.sh has started. It must have gone well up to here.
touch /tmp/load.stop
until [ -e /tmp/load.done ]; do
    usleep 10000
done
cat /tmp/load.log
! grep -qiE 'error|fail' /tmp/load.log
