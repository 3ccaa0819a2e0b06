module kitestring.dev/static-agent

go 1.24
