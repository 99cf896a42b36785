#!/bin/sh
# Ends what a test run started, also when the run itself was killed: leash.sh RUN_FOLDER
#
# The run holds the other end of our stdin and never writes to it, so `read` returns when the run is gone, however it went.
# Every server works in a folder below RUN_FOLDER; that is how it is recognised, so no list of process ids can be stale.
run=$1

read -r _

# Prints the ids of the processes that work below the run's folder.
strays() {
    for process in /proc/[0-9]*; do
        case $(readlink "$process/cwd" 2>/dev/null) in
            "$run" | "$run"/*) [ "${process#/proc/}" = $$ ] || echo "${process#/proc/}" ;;
        esac
    done
}

# A process may have been starting another one while we looked.
for _ in 1 2 3 4 5; do
    found=$(strays)
    [ -n "$found" ] || break
    # shellcheck disable=SC2086 # several ids
    kill -KILL $found 2>/dev/null
done

# A killed Postgres leaves its System V shared memory behind; line 7 of postmaster.pid names it.
for file in "$run"/*/data/postmaster.pid; do
    [ -f "$file" ] || continue
    # shellcheck disable=SC2046 # key and id
    set -- $(sed -n 7p "$file")
    [ -z "$2" ] || ipcrm -m "$2" 2>/dev/null
done

rm -rf "$run"
