# Ends the load of verify-start.sh, which must have read back its data without an error.
touch /tmp/verify.stop
while ps | grep -q '[f]io --name=verify'; do
    usleep 100000
done
until grep -q end /tmp/verify.done || [ $((tries += 1)) -gt 100 ]; do
    usleep 100000
done
grep -q end /tmp/verify.done || { cat /tmp/verify.log; exit 1; }
grep -c round /tmp/verify.done
