#!/bin/sh
# Prints the home of a Java that Spark can run on. Where there is none it installs Debian's, if it may; otherwise it
# says what to install and exits 1.
#
# usage: java.sh [FOLDER OF JVMS]      searched: $JAVA_HOME, PATH, the folder (/usr/lib/jvm)
set -eu

at_least=17
package=openjdk-17-jre-headless
jvms=${1:-/usr/lib/jvm}

say() { printf '%s\n' "$*" >&2; }

# Major version of the java in $1/bin, 0 where there is none: "17.0.15" is 17, "1.8.0_412" is 8.
version_of() {
  major=$("$1/bin/java" -version 2>&1 | sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9][0-9]*\).*/\2/p' | head -n 1) || true
  printf '%s' "${major:-0}"
}

new_enough() { [ -x "$1/bin/java" ] && [ "$(version_of "$1")" -ge "$at_least" ]; }

# The home a java program belongs to, following links such as /usr/bin/java.
home_of() { dirname "$(dirname "$(readlink -f "$1")")"; }

# The lowest version that is new enough: Spark is tested on that one first.
lowest_in_folder() {
  best=
  best_version=
  for home in "$jvms"/*; do
    new_enough "$home" || continue
    version=$(version_of "$home")
    if [ -z "$best" ] || [ "$version" -lt "$best_version" ]; then
      best=$home
      best_version=$version
    fi
  done
  [ -n "$best" ] && printf '%s\n' "$best"
}

find_java() {
  if [ -n "${JAVA_HOME:-}" ]; then
    if new_enough "$JAVA_HOME"; then
      printf '%s\n' "$JAVA_HOME"
      return 0
    fi
    say "JAVA_HOME=$JAVA_HOME holds no Java $at_least or newer; looking elsewhere"
  fi
  if program=$(command -v java); then
    home=$(home_of "$program")
    if new_enough "$home"; then
      printf '%s\n' "$home"
      return 0
    fi
  fi
  lowest_in_folder
}

find_java && exit 0

if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  say "no Java $at_least or newer was found: installing $package with apt-get"
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  # A repository that cannot be updated need not be the one that has the package.
  if { apt-get update; DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$package"; } \
    >"$log" 2>&1; then
    find_java && exit 0
    say "$package was installed, but $jvms and PATH still hold no Java $at_least or newer: set JAVA_HOME"
  else
    tail -n 20 "$log" >&2
    say "apt-get could not install $package: install a Java $at_least or newer and set JAVA_HOME"
  fi
  exit 1
fi

say "no Java $at_least or newer was found in JAVA_HOME, PATH or $jvms: install one (Debian and Ubuntu: sudo apt-get" \
  "install $package) or set JAVA_HOME, then run this again"
exit 1
