// The agent of an image that holds this program and nothing else: no shell, no C library, no Python. It asks its model
// once, rewards itself with what its task says it is worth, and says which files its image has.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	if err := work(); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

func work() error {
	var task struct {
		Question string
		Worth    float64
	}
	handed, err := os.ReadFile(os.Getenv("KITESTRING_TASK_FILE"))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(handed, &task); err != nil {
		return err
	}
	answer, err := ask(task.Question)
	if err != nil {
		return err
	}
	files, err := imageFiles()
	if err != nil {
		return err
	}
	output, err := json.Marshal(map[string]any{"answer": answer, "files": files})
	if err != nil {
		return err
	}
	if err := os.WriteFile(os.Getenv("KITESTRING_OUTPUT_FILE"), output, 0o600); err != nil {
		return err
	}
	_, err = post(os.Getenv("KITESTRING_BASE_URL")+"/rewards", map[string]any{"value": task.Worth})
	return err
}

// ask returns what the trained model replies to a question.
func ask(question string) (string, error) {
	said, err := post(os.Getenv("OPENAI_BASE_URL")+"/chat/completions", map[string]any{
		"model":      os.Getenv("OPENAI_MODEL"),
		"messages":   []map[string]string{{"role": "user", "content": question}},
		"max_tokens": 4,
	})
	if err != nil {
		return "", err
	}
	var reply struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err := json.Unmarshal(said, &reply); err != nil {
		return "", err
	}
	if len(reply.Choices) != 1 {
		return "", fmt.Errorf("one choice was asked for: %s", said)
	}
	return reply.Choices[0].Message.Content, nil
}

func post(url string, body any) ([]byte, error) {
	packed, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequest(http.MethodPost, url, bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+os.Getenv("OPENAI_API_KEY"))
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer reply.Body.Close()
	said, err := io.ReadAll(reply.Body)
	if err == nil && reply.StatusCode/100 != 2 {
		err = fmt.Errorf("%s: %s", reply.Status, said)
	}
	return said, err
}

// imageFiles lists all that is no folder on the container's root, without what is mounted over it.
func imageFiles() ([]string, error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	mounted := map[string]bool{}
	for _, line := range strings.Split(strings.TrimSpace(string(table)), "\n") {
		if point := strings.Fields(line)[4]; point != "/" {
			mounted[point] = true
		}
	}
	files := []string{}
	err = filepath.WalkDir("/", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && mounted[path]:
			return fs.SkipDir
		case !entry.IsDir() && !mounted[path]:
			files = append(files, path)
		}
		return nil
	})
	return files, err
}
