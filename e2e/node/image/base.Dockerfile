# Debian with Python, where images can be pulled; elsewhere debootstrap makes the same.
FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && chmod 0711 /root
CMD ["python3"]
