# Ends the load of load-start.sh, which must have had no error.
touch /tmp/load.stop
until [ -e /tmp/load.done ]; do
    usleep 10000
done
cat /tmp/load.log
! grep -qiE 'error|fail' /tmp/load.log
