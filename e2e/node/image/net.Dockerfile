# Debian with what kube-proxy and kube-router call.
ARG BASE
FROM ${BASE}
RUN apt-get update \
 && apt-get install -y --no-install-recommends iptables nftables ipset conntrack iproute2 kmod \
 && rm -rf /var/lib/apt/lists/*
