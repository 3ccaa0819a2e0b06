# A node of kind, as kind's own images/base/Dockerfile makes it, with Debian's containerd, runc and CNI plugins.
ARG BASE
FROM ${BASE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      systemd systemd-sysv dbus containerd containernetworking-plugins ethtool socat mount procps ebtables jq curl hostname \
 && rm -rf /var/lib/apt/lists/*
COPY kind/ /
COPY programs/ /usr/local/bin/
ARG VERSION
RUN chmod 0755 /kind/bin/* /usr/local/bin/* \
 && rm -f /lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service \
      /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/* \
      /lib/systemd/system/local-fs.target.wants/* /lib/systemd/system/sockets.target.wants/*udev* \
      /lib/systemd/system/sockets.target.wants/*initctl* /lib/systemd/system/basic.target.wants/* \
 && echo "ReadKMsg=no" >>/etc/systemd/journald.conf \
 && systemctl enable kubelet.service containerd.service undo-mount-hacks.service \
 && systemctl mask systemd-binfmt.service \
 && mkdir -p /etc/kubernetes/manifests /opt/cni \
 && ln -s /usr/lib/cni /opt/cni/bin \
 && ln -s /usr/local/bin/kubelet /usr/local/bin/kubeadm /usr/local/bin/kubectl /usr/bin/ \
 && ln -s /usr/bin/containerd /usr/bin/ctr /usr/local/bin/ \
 && echo "${VERSION}" >/kind/version \
 && ctr oci spec | jq 'del(.process.rlimits)' >/etc/containerd/cri-base.json
# On a machine without CAP_SYS_RESOURCE the node's runc is called through thin-runc.
ARG THIN
RUN [ "${THIN}" = no ] || \
      sed -i -e 's|^\( *\)SystemdCgroup = true|&\n\1BinaryName = "/usr/local/bin/thin-runc"|' \
             -e 's|restrict_oom_score_adj = false|restrict_oom_score_adj = true|' /etc/containerd/config.toml
ENV container=docker
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]
