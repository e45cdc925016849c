#!/bin/sh
# Makes the relative links of a page absolute, as PyPI shows the README without the files beside it.
#     absolute_links.sh README.md [https://HOST/OWNER/NAME] [TAG]
set -eu
repository=${2:-"$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"}
ref=${3:-"$GITHUB_REF_NAME"}
sed -E -i \
    -e "s#(!\[[^]]*\]\()([A-Za-z][A-Za-z/_-]*\.(png|svg))#\1$repository/raw/$ref/\2#g" \
    -e "s#(\]\()([A-Za-z][A-Za-z/_-]*\.md)#\1$repository/blob/$ref/\2#g" \
    "$1"
