# Runs `kitestring` from an environment that its pods mount at this machine's path: nothing heavy is in the image.
ARG BASE
FROM ${BASE}
ARG VENV
ARG FOLDER
ENV PATH=${VENV}/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR ${FOLDER}
USER 65532:65532
ENTRYPOINT ["kitestring"]
