module kitestring.dev/launcher

go 1.24
