# To be sourced in the checkout on a machine with a card and without a network, before `python3 bench/sglang.py`:
#
#     B=FOLDER . bench/sglang_card.sh
#
# FOLDER is a bundle: setup.sh (unpacks a site with SGLang to /tmp/site, and models), env.sh, and own.tar.xz with the
# packages of ours that neither the machine nor that site has (llguidance, httptools, prometheus_client). Our processes
# get the packages below from the site and nothing else: its transformers and tokenizers are older than ours.
export B
bash "$B/setup.sh" || return
OWN=/tmp/own
if [ ! -e "$OWN" ]; then
    mkdir "$OWN"
    for each in mooncake mooncake_transfer_engine_cuda13.libs fastapi starlette uvicorn pydantic pydantic_core zmq \
        pyzmq.libs msgspec h11 click anyio sniffio idna annotated_types annotated_doc typing_inspection \
        typing_extensions.py opentelemetry opentelemetry_api-1.45.2.dist-info; do
        cp -r "/tmp/site/$each" "$OWN/" || return
    done
    python3 -c "import tarfile; tarfile.open('$B/own.tar.xz').extractall('$OWN', filter='fully_trusted')" || return
fi
libraries=/tmp/site/syslib
ldconfig -p | grep -q libcurl.so.4 || libraries=$libraries:/tmp/site/curlstub
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$OWN:$PWD PYTHONUNBUFFERED=1
python3 -c "import cli.main, router.app, prefill_node.rank, decode_node.rank, node.sglang.supervisor, mooncake.engine, httpx, psutil, tokenizers"
