#!/bin/sh
# Installs other people's agents, each in a folder of its own below FOLDER, and writes
# FOLDER/environment: the variables by which the tests beside this script find them.
#
#   install.sh FOLDER PYTHON NAME...    with NAMEs of: node mini-swe-agent verifiers coding
#
# PYTHON (3.11 or newer) makes their virtual environments. Safe to repeat. node and coding need npm.

set -eu

folder=$1 python=$2
shift 2
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
found=$folder/environment.new
: >"$found"

say() { echo "==> Installing $*"; }

names() { printf "export %s='%s'\n" "$1" "$2" >>"$found"; }

from_npm() { # FOLDER PACKAGE...
	place=$1
	shift
	mkdir -p "$place"
	npm install --prefix "$place" --no-audit --no-fund --silent --save-exact "$@"
}

from_pypi() { # FOLDER REQUIREMENT...
	place=$1
	shift
	[ -x "$place/bin/python" ] || "$python" -m venv "$place"
	"$place/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

for name in "$@"; do
	place=$folder/$name
	case $name in
	node)
		say "OpenAI's and Anthropic's packages for Node.js, and Vercel's AI SDK"
		from_npm "$place" openai@7.59.0 @anthropic-ai/sdk@1.14.0 \
			ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/anthropic@3.0.140 zod@4
		names HEADRACE_NODE_AGENTS "$place"
		;;
	mini-swe-agent)
		say "mini-swe-agent"
		from_pypi "$place" mini-swe-agent==2.4.6 litellm==1.110.2
		names HEADRACE_MINI_SWE_AGENT_PYTHON "$place/bin/python"
		;;
	verifiers)
		say "verifiers, and uv, which prepares its agents"
		from_pypi "$place" verifiers==0.4.0 uv==0.13.9
		names HEADRACE_VERIFIERS_PYTHON "$place/bin/python"
		;;
	coding)
		say "Claude Code and Codex (hundreds of megabytes)"
		from_npm "$place" @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0
		names HEADRACE_CODING_AGENTS "$place"
		;;
	*)
		echo "unknown agent $name; use node, mini-swe-agent, verifiers or coding" >&2
		exit 2
		;;
	esac
done
mv "$found" "$folder/environment"
