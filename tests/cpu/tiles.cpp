// What native/cpp/tiles.h promises. Prints what it breaks first and fails.
#include "tiles.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <tuple>

#define CHECK(what) ((what) ? void(0) : (std::printf("line %d: %s\n", __LINE__, #what), std::exit(1)))

constexpr int64_t BLOCK = 16, WIDTH = 64;

struct Batch {
    std::vector<int32_t> starts{0}, context, tables;

    // A row of so many tokens; its first blocks are those of row `like`, the others its own.
    void row(int tokens, int positions, int like = -1, int blocks = 0) {
        int own = int(context.size()) * WIDTH;
        starts.push_back(starts.back() + tokens);
        context.push_back(positions);
        for (int i = 0; i < WIDTH; i++) tables.push_back(i < blocks ? tables[like * WIDTH + i] : own + i);
    }
    Rows rows() const {
        return {starts.data(), context.data(), tables.data(), int64_t(context.size()), WIDTH, BLOCK};
    }
};

// All tokens of all rows, once for each head; what rows share lies before their last positions and is the same.
void covered(const Rows &rows, int64_t group, int64_t kv_heads, const Tiles &tiles) {
    std::map<std::tuple<int64_t, int64_t, int64_t>, int> times;
    for (int64_t i = 0; i < tiles.size(); i++) {
        const Tile &t = tiles[i];
        CHECK(t.count * (t.last - t.first) * group <= std::max(QUERIES, group));
        CHECK(t.shared % KEYS == 0 && (t.count > 1) == (t.shared > 0));
        for (int64_t m = 0; m < t.count; m++) {
            CHECK(t.shared < rows.context[t.rows[m]]);
            for (int64_t p = 0; p < t.shared; p++) CHECK(rows.slot(t.rows[m], p) == rows.slot(t.rows[0], p));
            for (int64_t token = t.first; token < t.last; token++) times[{t.rows[m], token, t.head}]++;
        }
    }
    for (auto &[what, count] : times) CHECK(count == 1);
    CHECK(int64_t(times.size()) == rows.starts[rows.count] * kv_heads);
}

int64_t most_joined(const Tiles &tiles) {
    int64_t most = 0;
    for (int64_t i = 0; i < tiles.size(); i++) most = std::max(most, tiles[i].count);
    return most;
}

int main() {
    Batch batch;
    // Two prompts that many begin with, their rows taking turns; one row in between has several tokens.
    batch.row(1, 600);
    batch.row(1, 400);
    for (int i = 0; i < 40; i++) {
        batch.row(1, 530 + i, 0, 32);
        batch.row(1, 270 + i, 1, 16);
        if (i == 20) batch.row(50, 700, 0, 32);
    }
    Tiles few(batch.rows(), 3, 3, 1), many(batch.rows(), 3, 3, 64);
    covered(batch.rows(), 3, 3, few);
    covered(batch.rows(), 3, 3, many);
    CHECK(most_joined(few) == QUERIES / 3);  // 41 are alike
    CHECK(few.size() == (2 + 2) * 3 + 2 * 3);
    CHECK(most_joined(many) == 1);  // or there would be threads without a tile

    // A row that shares one tile of keys with those who share eight stays out.
    Batch odd;
    odd.row(1, 600);
    odd.row(1, 600, 0, 33);
    odd.row(1, 600, 0, 33);
    odd.row(1, 600, 0, 5);
    Tiles three(odd.rows(), 1, 8, 1);
    covered(odd.rows(), 1, 8, three);
    CHECK(most_joined(three) == 3);

    // Contexts that end where another's goes on; a row whose only block is being filled.
    Batch ends;
    ends.row(1, 65);
    ends.row(1, 64, 0, 4);
    ends.row(1, 200, 0, 4);
    ends.row(1, 1);
    Tiles two(ends.rows(), 1, 8, 1);
    covered(ends.rows(), 1, 8, two);
    CHECK(most_joined(two) == 2);  // the 64th position of one is its last, and its last block is its own
}
